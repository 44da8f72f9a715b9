package mover

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// maxCalls is how many requests of a mover may wait for their answers.
const maxCalls = 4096

// calls are the requests without an answer yet.
type calls struct {
	mu struct {
		sync.Mutex
		open map[uint64]*call
		last uint64
		err  error // the process has ended: no more calls
	}
}

// call is one request.
type call struct {
	what  string
	until int64 // tick
	take  func(*fields) error
	err   error         // readable once done is closed
	done  chan struct{} // closed after the call was removed from open
}

func (c *calls) init() { c.mu.open = map[uint64]*call{} }

func (c *calls) add(call *call) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.err != nil {
		return 0, c.mu.err
	}
	if len(c.mu.open) >= maxCalls {
		return 0, fmt.Errorf("%d requests wait, at most %d: %w", len(c.mu.open), maxCalls, cudaipc.ErrBusy)
	}
	c.mu.last++
	c.mu.open[c.mu.last] = call
	return c.mu.last, nil
}

func (c *calls) take(number uint64) *call {
	c.mu.Lock()
	defer c.mu.Unlock()
	call := c.mu.open[number]
	delete(c.mu.open, number)
	return call
}

// overdue returns a request whose time is over.
func (c *calls) overdue(now int64) *call {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, call := range c.mu.open {
		if now > call.until {
			return call
		}
	}
	return nil
}

// shorten gives a request no more time than until.
func (c *calls) shorten(number uint64, until int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if call := c.mu.open[number]; call != nil {
		call.until = min(call.until, until)
	}
}

// fail ends all requests, and those that come later.
func (c *calls) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.err = err
	for number, call := range c.mu.open {
		delete(c.mu.open, number)
		call.err = err
		close(call.done)
	}
}

// call sends a request and waits for its answer, which take reads. After limit the mover is lost;
// the wait ends when it is reaped.
func (p *process) call(what string, limit time.Duration, msg func(number uint64) ([]byte, []int),
	take func(*fields) error) error {
	return p.callCancellable(nil, what, limit, msg, take)
}

// callCancellable does what call does, for a request that may be cancelled: when cancelled is
// closed, it tells the mover, and the call has Limits.Cancel from then on.
func (p *process) callCancellable(cancelled <-chan struct{}, what string, limit time.Duration,
	msg func(number uint64) ([]byte, []int), take func(*fields) error) error {
	call := &call{what: what, until: p.clock.Load() + p.ticks(limit), take: take, done: make(chan struct{})}
	number, err := p.calls.add(call)
	if err != nil {
		return err
	}
	b, fds := msg(number)
	if err := p.post(what, b, fds); errors.Is(err, errNotSent) {
		p.calls.take(number)
		return fmt.Errorf("mover %s: %s: %w", p.m.opts.Name, what, err)
	}
	select {
	case <-call.done:
	case <-cancelled:
		p.calls.shorten(number, p.clock.Load()+p.ticks(p.m.opts.Limits.Cancel))
		p.cancel(call, number)
	}
	return call.err
}

// cancel tells the mover that a call is cancelled, and waits for the call's end. While other
// messages are being sent, it tries again each tick.
func (p *process) cancel(call *call, number uint64) {
	again := time.NewTicker(p.m.opts.Limits.Tick)
	defer again.Stop()
	for !p.trySend(msgCancel, int64(number)) {
		select {
		case <-call.done:
			return
		case <-again.C:
		}
	}
	<-call.done
}

// post sends a message. If it fails, the mover is lost, unless the error is errNotSent.
func (p *process) post(what string, msg []byte, fds []int) error {
	p.m.requests.Add(1)
	err := p.conn.send(msg, fds, time.Now().Add(p.m.opts.Limits.Ping))
	if err != nil && !errors.Is(err, errNotSent) {
		p.disconnect(fmt.Errorf("it does not take a request (%s): %w", what, err))
	}
	return err
}

func (p *process) ticks(d time.Duration) int64 {
	return int64((d + p.m.opts.Limits.Tick - 1) / p.m.opts.Limits.Tick)
}

func takeAnswer(f *fields) error {
	err := f.error()
	if bad := f.end("answer"); bad != nil {
		return bad
	}
	return err
}

// openDevice waits for the process's first message and has it open its device.
func (p *process) openDevice() error {
	o := &p.m.opts
	return p.call("open the device", o.Limits.Start, func(number uint64) ([]byte, []int) {
		b, err := putSetup(nil, number, &Setup{
			Device: o.Device, GPU: o.GPU, ArenaSize: o.ArenaSize, FireOnDeath: o.FireOnDeath, Populate: o.Populate,
		})
		if err != nil {
			panic(err) // strings, numbers and booleans
		}
		return b, []int{p.m.arena}
	}, takeAnswer)
}

func (p *process) importPeer(im *cudaipc.Import) error {
	return p.callCancellable(im.Cancelled, fmt.Sprintf("import of peer %d", im.Peer), p.m.opts.Limits.Import,
		func(number uint64) ([]byte, []int) {
			return putImport(nil, number, im)
		}, takeAnswer)
}

// closePeer closes a peer. The end of the process counts as the close.
func (p *process) closePeer(id cudaipc.PeerID) error {
	err := p.call(fmt.Sprintf("close of peer %d", id), p.m.opts.Limits.Close, func(number uint64) ([]byte, []int) {
		return put32(putHead(nil, msgClose, number), uint32(id)), nil
	}, takeAnswer)
	if errors.As(err, new(*cudaipc.LostError)) {
		return nil
	}
	return err
}

func (p *process) poll(waits []cudaipc.Wait, states []cudaipc.State) error {
	err := p.call("poll", p.m.opts.Limits.Poll, func(number uint64) ([]byte, []int) {
		return putPoll(nil, number, waits), nil
	}, func(f *fields) error { return takeStates(f, states) })
	if errors.As(err, new(*cudaipc.LostError)) {
		return fmt.Errorf("%w: %w", err, cudaipc.ErrPeer)
	}
	return err
}
