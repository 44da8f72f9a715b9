package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/agent"
)

// Times of the agent's process.
const (
	agentUpWithin   = 15 * time.Second
	agentDownWithin = 30 * time.Second
	agentPoll       = 2 * time.Millisecond // between questions to an agent that comes or cleans up
	keepLog         = 64 << 10             // bytes of the agent's log that are kept for an error
)

// replayAgent is the agent of a replay: a child process, or one that runs already.
type replayAgent struct {
	dir     string
	session string
	args    []string // of the child; nil: not ours
	private bool     // dir is ours to remove
	admin   *admin
	log     tailBuffer

	mu struct {
		sync.Mutex
		child   *agentChild
		stopAt  bool          // ending is what is wanted
		resumed chan struct{} // closed when it is let go on; nil while it is not stopped
		pauses  int
	}
	exits   chan error // of a child that ended though nobody had asked
	pausing sync.WaitGroup
}

// agentChild is one life of the agent.
type agentChild struct {
	pid     int
	wanted  bool // it was killed on purpose
	done    chan struct{}
	err     error // valid when done is closed
	started chan error
}

// useAgent is an agent that runs: its socket directory, or its session socket.
func useAgent(path string) *replayAgent {
	dir := strings.TrimSuffix(path, "/session.sock")
	return &replayAgent{dir: dir, session: filepath.Join(dir, "session.sock"), admin: newAdmin(dir), exits: make(chan error, 1)}
}

// launchAgent starts that of a node in a directory of its own.
func launchAgent(ctx context.Context, pool int64, s *replaySettings, node int) (*replayAgent, error) {
	dir, err := os.MkdirTemp("", "kvagent-replay-")
	if err != nil {
		return nil, err
	}
	a := useAgent(dir)
	a.private = true
	a.args = []string{"serve", "--socket-dir", dir, "--pool", formatSize(pool), "--integrity", s.integrity, "--verify-sample", strconv.Itoa(s.verify), "--eviction", s.eviction, "--device", s.device, "--log-level", "warn",
		"--max-engines", "4096", "--max-sessions", "2048"}
	if s.dramPath != "" {
		path := s.dramPath
		if node > 0 {
			path = fmt.Sprintf("%s.node%d", path, node)
		}
		a.args = append(a.args, "--dram-path", path)
	}
	a.args = append(a.args, s.tierArgs(dir, node)...)
	if s.flip {
		a.args = append(a.args, "--allow-faults")
	}
	if err := a.start(ctx); err != nil {
		a.remove()
		return nil, err
	}
	return a, nil
}

// start starts the child and waits until it answers.
func (a *replayAgent) start(ctx context.Context) error {
	c := &agentChild{done: make(chan struct{}), started: make(chan error, 1)}
	go a.live(c)
	if err := <-c.started; err != nil {
		return err
	}
	a.mu.Lock()
	a.mu.child = c
	a.mu.Unlock()
	ctx, stop := context.WithTimeout(ctx, agentUpWithin)
	defer stop()
	for {
		if _, err := a.status(ctx); err == nil {
			return nil
		}
		select {
		case <-c.done:
			return fmt.Errorf("the agent ended at its start: %w\n%s", c.err, a.log.String())
		case <-ctx.Done():
			return fmt.Errorf("the agent does not answer: %w\n%s", ctx.Err(), a.log.String())
		case <-time.After(agentPoll):
		}
	}
}

// live is one life of the child. Its thread stays this goroutine's, because the kernel ends the child with the thread
// that started it: should this process be killed, no agent is left behind.
func (a *replayAgent) live(c *agentChild) {
	runtime.LockOSThread()
	defer close(c.done)
	exe, err := os.Executable()
	if err != nil {
		c.started <- err
		return
	}
	cmd := exec.Command(exe, a.args...)
	cmd.Stdout, cmd.Stderr = &a.log, &a.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		c.started <- err
		return
	}
	c.pid = cmd.Process.Pid
	c.started <- nil
	c.err = cmd.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	if !c.wanted && !a.mu.stopAt {
		select {
		case a.exits <- fmt.Errorf("the agent ended: %w\n%s", errors.Join(c.err, errors.New("nobody had asked")), a.log.String()):
		default:
		}
	}
}

// expectDeath says that the next end of the child is wanted, and gives what is closed then; nil if it was said before.
func (a *replayAgent) expectDeath() (gone <-chan struct{}, kill func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.mu.child
	if c.wanted {
		return nil, nil
	}
	c.wanted = true
	return c.done, func() { _ = syscall.Kill(c.pid, syscall.SIGKILL) }
}

// pause stops the child for a while.
func (a *replayAgent) pause(ctx context.Context, d time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	pid := a.mu.child.pid
	if a.mu.resumed != nil || syscall.Kill(pid, syscall.SIGSTOP) != nil {
		return
	}
	a.mu.resumed = make(chan struct{})
	a.mu.pauses++
	a.pausing.Go(func() {
		select {
		case <-time.After(d):
		case <-ctx.Done():
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		close(a.mu.resumed)
		a.mu.resumed = nil
		_ = syscall.Kill(pid, syscall.SIGCONT) // if it was killed meanwhile there is nobody to wake
	})
}

func (a *replayAgent) isPaused() bool { return a.resumed() != nil }

// resumed is closed when the agent is let go on; nil if it is not stopped.
func (a *replayAgent) resumed() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.resumed
}

// pauses is how often it was stopped.
func (a *replayAgent) pauses() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.pauses
}

func (a *replayAgent) status(ctx context.Context) (st agent.Status, err error) {
	body, err := a.admin.get(ctx, "/status")
	if err == nil {
		err = json.Unmarshal(body, &st)
	}
	return st, err
}

// stop ends the child in order; an agent that was not started here is left alone.
func (a *replayAgent) stop() error {
	a.pausing.Wait()
	defer a.remove()
	a.mu.Lock()
	a.mu.stopAt = true
	c := a.mu.child
	a.mu.Unlock()
	if c == nil {
		return nil
	}
	_ = syscall.Kill(c.pid, syscall.SIGTERM)
	select {
	case <-c.done:
		if c.err != nil && !c.wanted {
			return fmt.Errorf("the agent did not end in order: %w\n%s", c.err, a.log.String())
		}
		return nil
	case <-time.After(agentDownWithin):
		_ = syscall.Kill(c.pid, syscall.SIGKILL)
		<-c.done
		return fmt.Errorf("the agent did not end within %v of SIGTERM\n%s", agentDownWithin, a.log.String())
	}
}

func (a *replayAgent) remove() {
	if a.private {
		_ = os.RemoveAll(a.dir)
	}
}

// tailBuffer keeps the end of what is written.
type tailBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.b.Len() > keepLog {
		t.b.Next(t.b.Len() / 2)
	}
	return t.b.Write(p)
}

func (t *tailBuffer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.String()
}
