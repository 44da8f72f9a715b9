package replay

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/lab/child"
	"github.com/kvagent/kvagent/settings"
)

// verifySample is more than serve's default: a check could be wrong where engines are killed, or
// revoke their saves.
const verifySample = 10 // one block in so many

// Times of the agent's process.
const (
	agentUpWithin   = time.Minute
	agentDownWithin = 30 * time.Second
	agentPoll       = 2 * time.Millisecond // between polls of an agent that starts or cleans up
)

// reportWithin is how long the report of an engine that killed an agent may be in transit. Tests
// replace it.
var reportWithin = 5 * time.Second

// agentProcess is the agent of a replay: a child process, or one that runs already.
type agentProcess struct {
	node    int
	dir     string
	session string
	program string   // of the child
	args    []string // of the child; nil: not started here
	private bool     // dir is removed at the end
	admin   *adminclient.Client
	log     child.Tail

	mu struct {
		sync.Mutex
		child   *agentIncarnation
		resumed chan struct{} // closed when it continues; nil while it is not stopped
		pauses  int
		kills   int
	}
	exits   chan error // of a child that ended unexpectedly
	pausing sync.WaitGroup
}

// agentIncarnation is one process of the agent.
type agentIncarnation struct {
	*child.Process
	wanted   bool          // it was killed on purpose, or is to end
	expected chan struct{} // closed with that
}

func newIncarnation(p *child.Process) *agentIncarnation {
	return &agentIncarnation{Process: p, expected: make(chan struct{})}
}

// want records, once, that the end of the incarnation is intended. It returns false if it was
// recorded before. The agent's lock is held.
func (c *agentIncarnation) want() bool {
	if c.wanted {
		return false
	}
	c.wanted = true
	close(c.expected)
	return true
}

// useAgent returns an agent that runs: its socket directory, or its session socket.
func useAgent(path string) *agentProcess {
	dir := strings.TrimSuffix(path, "/session.sock")
	return &agentProcess{dir: dir, session: filepath.Join(dir, "session.sock"), admin: adminclient.New(dir),
		exits: make(chan error, 1)}
}

// newAgent returns the agent of a node in a directory of its own, not yet started. It sends to
// exits when the agent ends unexpectedly.
func newAgent(pool int64, s *scenario, node int, exits chan error) (*agentProcess, error) {
	dir, err := os.MkdirTemp("", "kvagent-replay-")
	if err != nil {
		return nil, err
	}
	a := useAgent(dir)
	a.node, a.private, a.exits, a.program = node, true, exits, s.kvagent
	a.args = []string{"serve", "--socket-dir", dir, "--pool", settings.FormatSize(pool), "--integrity", s.integrity,
		"--verify-sample", strconv.Itoa(verifySample), "--eviction", s.eviction, "--device", s.device, "--log-level",
		"warn"}
	if s.dramPath != "" {
		path := s.dramPath
		if node > 0 {
			path = fmt.Sprintf("%s.node%d", path, node)
		}
		a.args = append(a.args, "--dram-path", path)
	}
	a.args = append(a.args, s.tierArgs(dir, node)...)
	return a, nil
}

// start starts the child and waits until it answers.
func (a *agentProcess) start(ctx context.Context) error {
	cmd := exec.Command(a.program, a.args...)
	cmd.Stdout, cmd.Stderr = &a.log, &a.log
	started, err := child.Start(cmd)
	if err != nil {
		return err
	}
	c := newIncarnation(started)
	a.mu.Lock()
	a.mu.child = c
	a.mu.Unlock()
	go a.reportEnd(c) // it ends with the child, which stop waits for
	ctx, stop := context.WithTimeout(ctx, agentUpWithin)
	defer stop()
	for {
		if _, err := a.status(ctx); err == nil {
			return nil
		}
		select {
		case <-c.Done:
			return fmt.Errorf("the agent of node %d ended at its start: %w\n%s", a.node, c.Err, a.log.String())
		case <-ctx.Done():
			return fmt.Errorf("the agent of node %d does not answer: %w\n%s", a.node, ctx.Err(), a.log.String())
		case <-time.After(agentPoll):
		}
	}
}

// reportEnd reports an incarnation that ends unexpectedly. The report of an engine that killed it
// may still be in transit.
func (a *agentProcess) reportEnd(c *agentIncarnation) {
	<-c.Done
	limit := time.NewTimer(reportWithin)
	defer limit.Stop()
	select {
	case <-c.expected:
		return
	case <-limit.C:
	}
	select {
	case a.exits <- fmt.Errorf("the agent of node %d ended unexpectedly: %w\n%s", a.node, c.Err, a.log.String()):
	default:
	}
}

// current returns the incarnation that runs.
func (a *agentProcess) current() *agentIncarnation {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.child
}

// expectDeath records that the end of an incarnation is intended, and kills it. It returns false if
// that was recorded before, or if it has ended and another one has begun.
func (a *agentProcess) expectDeath(c *agentIncarnation) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c == nil || c != a.mu.child || !c.want() {
		return false
	}
	a.mu.kills++
	c.Signal(syscall.SIGKILL) // an engine that reports a kill may itself have been killed before it sent the signal
	return true
}

// pause stops the child for a while, or until it ends. It returns false if it is stopped already.
func (a *agentProcess) pause(ctx context.Context, d time.Duration) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.mu.child
	if a.mu.resumed != nil || c.wanted || c.OS.Signal(syscall.SIGSTOP) != nil {
		return false
	}
	a.mu.resumed = make(chan struct{})
	a.mu.pauses++
	a.pausing.Go(func() {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-c.Done:
		case <-ctx.Done():
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		close(a.mu.resumed)
		a.mu.resumed = nil
		c.Signal(syscall.SIGCONT)
	})
	return true
}

func (a *agentProcess) isPaused() bool { return a.resumed() != nil }

// resumed returns a channel that is closed when the agent continues; nil if it is not stopped.
func (a *agentProcess) resumed() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.resumed
}

// pauses returns how often it was stopped.
func (a *agentProcess) pauses() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.pauses
}

// killed returns how often it was killed.
func (a *agentProcess) killed() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.kills
}

func (a *agentProcess) status(ctx context.Context) (st admin.Status, err error) {
	body, err := a.admin.Get(ctx, "/status")
	if err == nil {
		err = json.Unmarshal(body, &st)
	}
	return st, err
}

// stop ends the child in order, within that time; an agent that was not started here is left alone.
func (a *agentProcess) stop(within time.Duration) error {
	a.pausing.Wait()
	defer a.remove()
	a.mu.Lock()
	c := a.mu.child
	killed := c != nil && !c.want()
	a.mu.Unlock()
	if c == nil {
		return nil
	}
	if err := c.End(within); err != nil {
		return fmt.Errorf("the agent of node %d %w\n%s", a.node, err, a.log.String())
	}
	if c.Err != nil && !killed {
		return fmt.Errorf("the agent of node %d did not end in order: %w\n%s", a.node, c.Err, a.log.String())
	}
	return nil
}

func (a *agentProcess) remove() {
	if a.private {
		_ = os.RemoveAll(a.dir)
	}
}
