package mover

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// read receives the mover's messages until its end of the socket is closed. The process has ended
// then, or is about to.
func (l *life) read() {
	var msg []byte
	first := true
	for {
		var fds []int
		var err error
		if msg, fds, err = l.conn.receive(msg); err == nil {
			closeAll(fds) // none comes
			err = l.message(msg, first)
			first = false
		}
		if err != nil {
			if !l.quitting.Load() {
				l.disconnect(fmt.Errorf("its socket: %w", err))
			}
			return
		}
	}
}

// message handles one message. An error is the mover's fault.
func (l *life) message(msg []byte, first bool) error {
	f := &fields{rest: msg}
	kind, number := f.u8(), f.u64()
	if first != (kind == msgHello) {
		return fmt.Errorf("message %d, first: %v: %w", kind, first, errWire)
	}
	switch kind {
	case msgHello:
		return l.hello(f)
	case msgPong:
		l.pong.Store(l.clock.Load())
		return f.end("pong")
	case msgDone:
		d, err := takeDone(f)
		if err != nil {
			return err
		}
		return l.m.finish(cudaipc.Ticket(number), d)
	case msgInfoIs:
		info := append([]byte(nil), f.rest...)
		l.info.Store(&info)
		l.m.lives.Go(func() {
			l.m.inform(info)
			l.informed.Store(true)
		})
		return nil
	case msgLost:
		l.lose(cudaipc.LostDevice, errors.New(string(f.bytes())))
		return f.end("lost")
	case msgAnswer, msgStates, msgEventsAre:
		call := l.calls.take(number)
		if call == nil {
			return fmt.Errorf("answer to request %d, which was not made: %w", number, errWire)
		}
		call.err = call.take(f)
		close(call.done)
		if errors.Is(call.err, errWire) {
			return call.err
		}
		return nil
	}
	return fmt.Errorf("message %d: %w", kind, errWire)
}

// hello compares the builds. Nothing else ensures that both ends speak one protocol.
func (l *life) hello(f *fields) error {
	build := string(f.bytes())
	if err := f.end("hello"); err != nil {
		return err
	}
	if build != l.m.build {
		return fmt.Errorf("it is another binary: %s, this one is %s", build, l.m.build)
	}
	return nil
}

// supervise checks the mover once per tick until it dies. Time is counted in ticks of this
// goroutine, so that it stops while this process is stopped.
func (l *life) supervise() {
	ticker := time.NewTicker(l.m.opts.Limits.Tick)
	defer ticker.Stop()
	for {
		select {
		case <-l.ending:
			return
		case <-l.reaped:
			return
		case <-ticker.C:
		}
		now := l.clock.Add(1)
		if reason, err := l.overdue(now); err != nil {
			l.lose(reason, err)
			return
		}
		l.trySend(msgPing, now)
		if now%l.ticks(infoEvery) == 1 {
			l.ask(now)
		}
	}
}

// overdue returns what the mover has not done within its limit.
func (l *life) overdue(now int64) (cudaipc.LossReason, error) {
	limits := &l.m.opts.Limits
	ping := limits.Ping
	if l.m.releasing(l) {
		ping = min(ping, limits.Quiet)
	}
	if now-l.pong.Load() > l.ticks(ping) {
		return cudaipc.LostPing, fmt.Errorf("it did not answer a ping within %v", ping)
	}
	if call := l.calls.overdue(now); call != nil {
		return cudaipc.LostCall, fmt.Errorf("it did not answer in time: %s%s", call.what, l.m.errorHint())
	}
	if id, stuck := l.m.stuck(l, now); stuck {
		return cudaipc.LostCopy, fmt.Errorf("no copy of peer %d ended within %v%s", id, limits.Copy, l.m.errorHint())
	}
	return "", nil
}

// errorHint returns what the user can do about a process that does not end.
func (m *Mover) errorHint() string {
	if m.opts.Device != cudaipc.CUDADevice {
		return ""
	}
	return ": a call of the driver does not return; see dmesg for Xid lines, and nvidia-smi; " +
		"a GPU that hangs is reset by nvidia-smi --gpu-reset, or with the node. " +
		"Engines on other GPUs, and on CPUs, are served on"
}

// releasing reports whether a peer of a life is being closed, or will be because its process is
// dead.
func (m *Mover) releasing(l *life) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, p := range m.mu.peers {
		if p.life == l && (p.closing || p.view.Dead()) {
			return true
		}
	}
	return false
}

// stuck finds a peer of a life whose copies do not end.
func (m *Mover) stuck(l *life, now int64) (cudaipc.PeerID, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for id, p := range m.mu.peers {
		for lane := range p.pending {
			if p.life == l && p.pending[lane] > 0 && now-p.since[lane] > l.ticks(m.opts.Limits.Copy) {
				return id, true
			}
		}
	}
	return 0, false
}

// infoEvery is how often a mover is asked for its device's state, if it has answered the last
// question.
const infoEvery = 2 * time.Second

// trySend sends a message that may be left out. It sends nothing while another message is being
// sent, since it would have to wait for the mover. A ping that is not sent has no answer either.
func (l *life) trySend(kind byte, now int64) (sent bool) {
	c := l.conn
	if !c.sending.TryLock() {
		return false
	}
	defer c.sending.Unlock()
	_ = c.conn.SetWriteDeadline(time.Now().Add(l.m.opts.Limits.Tick)) // as in send
	return c.packet(packetLast, putHead(nil, kind, uint64(now)), nil) == nil
}

// ask asks for the device's state.
func (l *life) ask(now int64) {
	if l.informed.Swap(false) {
		l.informed.CompareAndSwap(false, !l.trySend(msgInfo, now))
	}
}
