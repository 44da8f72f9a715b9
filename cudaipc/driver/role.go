//go:build cuda

package driver

// Role is a goroutine that has an OS thread of its own, with a context current on it: the only
// goroutines that call the driver. It ends with its thread. A nil role, one that did not start,
// does nothing.
type Role struct {
	work  chan func()
	over  chan struct{} // closed by Close
	ended chan struct{}
}

// StartRole starts a role that does what it is given by Do, until Close.
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

// Do has f done in the role and waits for its end. A role that is closed, which may happen
// meanwhile, does not do it any more.
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

// Begin has f done in the role, which may take as long as the role lives: nothing else is given to
// it.
func (r *Role) Begin(f func()) { r.work <- f }

// Close waits for the role's end: what it was given is done.
func (r *Role) Close() {
	if r == nil {
		return
	}
	close(r.over)
	<-r.ended
}
