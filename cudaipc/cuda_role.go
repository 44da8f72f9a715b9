//go:build cuda

package cudaipc

import (
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc/driver"
)

// role is a goroutine that has an OS thread of its own, with the device's context current on it: the only goroutines that call the
// driver. It ends with its thread. A nil role, one that did not start, does nothing.
type role struct {
	work  chan func()
	over  chan struct{} // closed by close
	ended chan struct{}
}

// startRole starts a role that does what it is given by do, until close.
func startRole(ctx *driver.Context) (*role, error) {
	r := &role{work: make(chan func()), over: make(chan struct{}), ended: make(chan struct{})}
	entered := make(chan error)
	go func() {
		defer close(r.ended)
		err := ctx.Enter()
		entered <- err
		if err == nil {
			r.serve()
		}
	}()
	if err := <-entered; err != nil {
		<-r.ended
		return nil, err
	}
	return r, nil
}

func (r *role) serve() {
	for {
		select {
		case f := <-r.work:
			f()
		case <-r.over:
			return
		}
	}
}

// do has f done in the role and waits for its end. A role that is closed, which may happen meanwhile, does not do it any more.
func (r *role) do(f func()) {
	if r == nil {
		return
	}
	done := make(chan struct{})
	select {
	case r.work <- func() {
		defer close(done)
		f()
	}:
		<-done
	case <-r.over:
	}
}

// begin has f done in the role, which may take as long as the role lives: nothing else is given to it.
func (r *role) begin(f func()) { r.work <- f }

// close waits for the role's end: what it was given is done.
func (r *role) close() {
	if r == nil {
		return
	}
	close(r.over)
	<-r.ended
}

// preciseSleep lets the calling thread wake up from short sleeps within a microsecond instead of fifty.
func preciseSleep() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0) }
