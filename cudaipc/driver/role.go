//go:build cuda

package driver

// Role is a goroutine with an OS thread of its own and a current context. Only roles call the
// driver. A role ends with its thread. A nil role, which did not start, does nothing.
type Role struct {
	work  chan func()
	over  chan struct{} // closed by Close
	ended chan struct{}
}

// StartRole starts a role that runs the functions of Do until Close.
func StartRole(ctx *Context) (*Role, error) {
	r := &Role{work: make(chan func()), over: make(chan struct{}), ended: make(chan struct{})}
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

func (r *Role) serve() {
	for {
		select {
		case f := <-r.work:
			f()
		case <-r.over:
			return
		}
	}
}

// Do runs f in the role and waits for its end. It returns without running f if the role is
// closed, also meanwhile.
func (r *Role) Do(f func()) {
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

// Begin runs f in the role for as long as the role lives. No other function is passed to it.
func (r *Role) Begin(f func()) { r.work <- f }

// Close waits for the role's end, after its current function.
func (r *Role) Close() {
	if r == nil {
		return
	}
	close(r.over)
	<-r.ended
}
