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

// serverDownWithin is how long the server of a shared tier may take to end after SIGTERM.
const serverDownWithin = 5 * time.Second

// server is the server of the shared tier, through all its incarnations.
type server struct {
	command string
	log     child.Tail

	mu struct {
		sync.Mutex
		child  *child.Process
		wanted bool // its end is intended, or it is down
		paused bool
	}
}

// startServer starts the server, if there is one. Agents wait for it as for any tier
// (tiers-within).
func (r *replay) startServer() error {
	if r.set.server == "" {
		return nil
	}
	r.server = &server{command: r.set.server}
	return r.server.start(r.fail)
}

// start starts an incarnation of the server; it calls fail when the server ends unexpectedly.
func (s *server) start(fail func(error)) error {
	cmd := exec.Command("sh", "-c", s.command)
	cmd.Stdout, cmd.Stderr = &s.log, &s.log
	c, err := child.Start(cmd)
	if err != nil {
		return fmt.Errorf("server: %w", err)
	}
	s.mu.Lock()
	s.mu.child, s.mu.wanted = c, false
	s.mu.Unlock()
	go func() { // it ends with the child, which stopServer waits for
		<-c.Done
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.mu.wanted {
			fail(fmt.Errorf("server: %s ended unexpectedly: %w\n%s", s.command, c.Err, s.log.String()))
		}
	}()
	return nil
}

// killServer kills the server and starts it again after serverDown, unless the engines have left by
// then.
func (r *replay) killServer(ctx context.Context) {
	s := r.server
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.wanted {
		return // it is down already
	}
	s.mu.wanted = true
	c := s.mu.child
	c.Signal(syscall.SIGKILL)
	r.count(&r.tally.ServerKills, 0)
	r.watch("the server to start again", func() {
		<-c.Done
		sleepUntil(ctx, r.leaving, r.set.serverDown)
		select {
		case <-r.leaving:
			return
		case <-ctx.Done():
			return
		default:
		}
		if err := s.start(r.fail); err != nil {
			r.fail(err)
		}
	})
}

// pauseServer stops the server for a while, or until it is killed: its sockets stay open but do not
// answer.
func (r *replay) pauseServer(ctx context.Context) {
	s := r.server
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.mu.child
	if s.mu.wanted || s.mu.paused || c.OS.Signal(syscall.SIGSTOP) != nil {
		return
	}
	s.mu.paused = true
	r.count(&r.tally.ServerPauses, 0)
	r.watch("the server to be let go on", func() {
		sleepUntil(ctx, c.Done, r.set.pauseFor)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.mu.paused = false
		c.Signal(syscall.SIGCONT)
	})
}

// stopServer ends the server, if there is one.
func (r *replay) stopServer() error {
	s := r.server
	if s == nil {
		return nil
	}
	s.mu.Lock()
	s.mu.wanted = true
	c := s.mu.child
	s.mu.Unlock()
	if c == nil {
		return nil
	}
	if err := c.End(serverDownWithin); err != nil {
		return fmt.Errorf("server: %w\n%s", err, s.log.String())
	}
	return nil
}
