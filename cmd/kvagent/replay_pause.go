package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of what hits helpers.
const (
	helperVictim = 10 * time.Second // for a helper to be there
	helperPoll   = 10 * time.Millisecond
	helperName   = "kvagent.mooncake" // in its command line
)

// anyFault reports whether anything is to be killed or paused.
func (s *replaySettings) anyFault() bool {
	return s.killEngine+s.killAgent+s.killMover+s.killHelper+s.killServer > 0 ||
		s.pauseEngine+s.pauseAgent+s.pauseHelper+s.pauseServer > 0
}

// checkFaults is what the settings of kills and pauses cannot say for themselves.
func (s *replaySettings) checkFaults() error {
	var bad []error
	if s.killHelper+s.pauseHelper > 0 && !s.hasHelper() {
		bad = append(bad, errors.New("kill-helper-every, pause-helper-every: no tier has a helper, allowed with a "+
			"--tier or --shared of mooncake"))
	}
	if s.server == "" && s.killServer+s.pauseServer > 0 {
		bad = append(bad, errors.New("kill-server-every, pause-server-every: allowed with server"))
	}
	if s.server != "" && (s.shared == "" || len(strings.Fields(s.server)) == 0) {
		bad = append(bad, fmt.Errorf("server: %q, allowed: a command line, with shared", s.server))
	}
	if pauses := s.pauseEngine + s.pauseAgent + s.pauseHelper + s.pauseServer; pauses > 0 &&
		s.pauseFor >= s.stalledAfter {
		bad = append(bad, fmt.Errorf("pause-for: %v, allowed: 1ms to less than stalled-after (%v)", s.pauseFor,
			s.stalledAfter))
	}
	return errors.Join(bad...)
}

func (s *replaySettings) hasHelper() bool {
	for _, text := range append([]string{s.shared}, s.tiers...) {
		if strings.HasPrefix(text, "mooncake:") {
			return true
		}
	}
	return false
}

// pauseEngine stops a process of engines for a while. It reports nothing meanwhile, and the others
// wait for it at the end of the stretch.
func (r *replay) pauseEngine(ctx context.Context) {
	p := r.processes[r.rng.IntN(len(r.processes))]
	c := p.child
	if p.wanted || c.process.Signal(syscall.SIGSTOP) != nil {
		return
	}
	r.count(&r.tally.enginePauses, 0)
	r.watch(fmt.Sprintf("process %d of engines to be let go on", c.process.Pid), func() {
		sleepUntil(ctx, c.done, r.set.pauseFor)
		c.signal(syscall.SIGCONT)
	})
}

// strikeHelper kills the helper of an agent, or stops it for a while.
func (r *replay) strikeHelper(ctx context.Context, a *replayAgent, pause bool) {
	r.watch(fmt.Sprintf("the helper of node %d to be hit", a.node), func() {
		fd := a.awaitHelper(ctx)
		if fd < 0 {
			return
		}
		defer func() { _ = unix.Close(fd) }() // nothing was written
		first, n := unix.SIGKILL, &r.tally.helperKills
		if pause {
			first, n = unix.SIGSTOP, &r.tally.helperPauses
		}
		if unix.PidfdSendSignal(fd, first, nil, 0) != nil {
			return // it has ended, with its agent
		}
		r.count(n, 0)
		if pause {
			sleepUntil(ctx, nil, r.set.pauseFor)
			_ = unix.PidfdSendSignal(fd, unix.SIGCONT, nil, 0) // an error says that it is gone
		}
	})
}

// awaitHelper gives a descriptor of the process of an agent's helper, once there is one; -1: there
// is none soon.
func (a *replayAgent) awaitHelper(ctx context.Context) (fd int) {
	ctx, stop := context.WithTimeout(ctx, helperVictim)
	defer stop()
	for ctx.Err() == nil {
		c := a.current()
		for _, pid := range childrenOf(c.process.Pid) {
			if !strings.Contains(commandLine(pid), helperName+" serve") {
				continue
			}
			if fd, err := unix.PidfdOpen(pid, 0); err == nil {
				return fd
			}
		}
		sleepUntil(ctx, nil, helperPoll)
	}
	return -1
}

// sleepUntil waits for so long, or until ctx or gone, which may be nil, is done.
func sleepUntil(ctx context.Context, gone <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-gone:
	case <-ctx.Done():
	}
}
