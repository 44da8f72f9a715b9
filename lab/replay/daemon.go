package replay

import (
	"context"
	"fmt"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/lab/child"
)

// reportWithin is how long the report of an engine that killed an agent may be in transit. Tests
// replace it.
var reportWithin = 5 * time.Second

// daemon is a process that runs beside the engines, an agent or the server of a shared tier,
// through all its incarnations.
type daemon struct {
	name    string   // in errors
	command []string // program and arguments; nil: it was not started here
	struck  bool     // engines may kill it, and report so
	exits   chan error
	log     child.Tail

	mu struct {
		sync.Mutex
		child   *incarnation
		resumed chan struct{} // closed when it continues; nil while it is not stopped
		pauses  int
		kills   int
	}
	pausing sync.WaitGroup
}

// incarnation is one process of a daemon.
type incarnation struct {
	*child.Process
	wanted   bool          // it was killed on purpose, or is to end
	expected chan struct{} // closed with that
}

func newIncarnation(p *child.Process) *incarnation {
	return &incarnation{Process: p, expected: make(chan struct{})}
}

// want records, once, that the end of the incarnation is intended. It returns false if it was
// recorded before. The daemon's lock is held.
func (c *incarnation) want() bool {
	if c.wanted {
		return false
	}
	c.wanted = true
	close(c.expected)
	return true
}

// launch starts an incarnation. An error is sent to exits if it ends unexpectedly.
func (d *daemon) launch() (*incarnation, error) {
	cmd := exec.Command(d.command[0], d.command[1:]...)
	cmd.Stdout, cmd.Stderr = &d.log, &d.log
	started, err := child.Start(cmd)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.name, err)
	}
	c := newIncarnation(started)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.child = c
	go d.reportEnd(c) // it ends with the child, which end waits for
	return c, nil
}

// reportEnd reports an incarnation that ends unexpectedly. The report of an engine that killed it
// may still be in transit.
func (d *daemon) reportEnd(c *incarnation) {
	<-c.Done
	within := reportWithin
	if !d.struck {
		within = 0
	}
	limit := time.NewTimer(within)
	defer limit.Stop()
	select {
	case <-c.expected:
	case <-limit.C:
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.wanted {
		return
	}
	select {
	case d.exits <- d.failed("ended unexpectedly", c.Err):
	default:
	}
}

// failed returns an error with what the daemon said.
func (d *daemon) failed(how string, err error) error {
	return fmt.Errorf("%s %s: %w\n%s", d.name, how, err, d.log.String())
}

// current returns the incarnation that runs, or ran last; nil if it was not started here.
func (d *daemon) current() *incarnation {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.child
}

// expectDeath records that the end of an incarnation is intended, and kills it. It returns false if
// that was recorded before, or if it has ended and another one has begun.
func (d *daemon) expectDeath(c *incarnation) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c == nil || c != d.mu.child || !c.want() {
		return false
	}
	d.mu.kills++
	c.Signal(syscall.SIGKILL) // an engine that reports a kill may itself have been killed before it sent the signal
	return true
}

// pause stops the incarnation for a while, or until it ends: its sockets stay open but do not
// answer. It returns false if it is stopped or killed already.
func (d *daemon) pause(ctx context.Context, long time.Duration) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.mu.child
	if d.mu.resumed != nil || c.wanted || c.OS.Signal(syscall.SIGSTOP) != nil {
		return false
	}
	d.mu.resumed = make(chan struct{})
	d.mu.pauses++
	d.pausing.Go(func() {
		sleepUntil(ctx, c.Done, long)
		d.mu.Lock()
		defer d.mu.Unlock()
		close(d.mu.resumed)
		d.mu.resumed = nil
		c.Signal(syscall.SIGCONT)
	})
	return true
}

func (d *daemon) isPaused() bool { return d.resumed() != nil }

// resumed returns a channel that is closed when the daemon continues; nil if it is not stopped.
func (d *daemon) resumed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.resumed
}

// faults returns how often the daemon was killed and stopped.
func (d *daemon) faults() (kills, pauses int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.kills, d.mu.pauses
}

// end ends the daemon in order, within that time. One that was not started here is left alone.
func (d *daemon) end(within time.Duration) error {
	d.pausing.Wait()
	d.mu.Lock()
	c := d.mu.child
	killed := c != nil && !c.want()
	d.mu.Unlock()
	if c == nil {
		return nil
	}
	if err := c.End(within); err != nil {
		return d.failed("did not end", err)
	}
	if c.Err != nil && !killed && d.struck {
		return d.failed("did not end in order", c.Err)
	}
	return nil
}

// sleepUntil waits that long, or until ctx or done, which may be nil, is done.
func sleepUntil(ctx context.Context, done <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-done:
	case <-ctx.Done():
	}
}
