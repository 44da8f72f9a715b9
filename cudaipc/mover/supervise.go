package mover

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// read receives the mover's messages until its socket ends, and so the process.
func (p *process) read() {
	var msg []byte
	for {
		var fds []int
		var err error
		if msg, fds, err = p.conn.receive(msg); err == nil {
			closeAll(fds) // none comes
			err = p.message(msg)
		}
		if err != nil {
			if !p.quitting.Load() {
				p.disconnect(fmt.Errorf("its socket: %w", err))
			}
			return
		}
	}
}

// message handles one message. An error is the mover's fault.
func (p *process) message(b []byte) error {
	m, err := unpack(b)
	if err != nil {
		return err
	}
	switch m.kind {
	case msgPong:
		p.pong.Store(p.clock.Load())
		return nil
	case msgDone:
		d, err := takeDone(&m)
		if err != nil {
			return err
		}
		return p.finish(m.number, d)
	case msgInfo:
		info := &cudaipc.CUDAInfo{}
		err := m.read(info)
		if info.Lost != "" {
			p.lose(cudaipc.LostDevice, errors.New(info.Lost))
			return err
		}
		if p.info.Store(info); p.m.opts.Informed != nil && p.informing.TryLock() { // else the next report tells
			p.m.processes.Go(func() {
				defer p.informing.Unlock()
				p.m.opts.Informed(*info)
			})
		}
		return err
	case msgAnswer:
		call := p.takeCall(m.number)
		if call == nil {
			return fmt.Errorf("answer to request %d, which was not made: %w", m.number, errWire)
		}
		var a answer
		err := m.read(&a)
		call.state, call.err = a.State, cmp.Or(err, arrived(a.Err))
		close(call.done)
		return err
	}
	return fmt.Errorf("message %d: %w", m.kind, errWire)
}

// supervise checks the mover once per tick until it dies. Time is counted in ticks of this
// goroutine, so that it stops while this process is stopped.
func (p *process) supervise() {
	ticker := time.NewTicker(p.m.opts.Limits.Tick)
	defer ticker.Stop()
	for {
		select {
		case <-p.ending:
			return
		case <-p.reaped:
			return
		case <-ticker.C:
		}
		now := p.clock.Add(1)
		if reason, err := p.overdue(now); err != nil {
			p.lose(reason, err)
			return
		}
		p.ping(now)
	}
}

// overdue returns what the mover has not done within its limit.
func (p *process) overdue(now int64) (cudaipc.LossReason, error) {
	limits := &p.m.opts.Limits
	ping := limits.Ping
	if p.releasing() {
		ping = min(ping, limits.Quiet)
	}
	if now-p.pong.Load() > p.ticks(ping) {
		return cudaipc.LostPing, fmt.Errorf("it did not answer a ping within %v", ping)
	}
	p.m.mu.RLock()
	defer p.m.mu.RUnlock()
	for _, call := range p.calls {
		if now > call.until {
			return cudaipc.LostCall, fmt.Errorf("it did not answer in time: %s%s", call.what, p.m.errorHint())
		}
	}
	for _, f := range p.flights {
		if now-f.lane.since > p.ticks(limits.Copy) {
			return cudaipc.LostCopy, fmt.Errorf("no copy of an engine ended within %v%s", limits.Copy, p.m.errorHint())
		}
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

// open returns the peers that are open.
func (p *process) open() []*peer {
	p.m.mu.RLock()
	defer p.m.mu.RUnlock()
	return slices.Collect(maps.Keys(p.peers))
}

// releasing reports whether a peer of a process is being closed, or will be because it is dead.
func (p *process) releasing() bool {
	return p.closing.Load() > 0 ||
		slices.ContainsFunc(p.open(), (*peer).Dead)
}

// ping asks for a sign of life, unless another message is being sent, for which it would have to
// wait. A ping that is not sent has no answer either.
func (p *process) ping(now int64) {
	c := p.conn
	if !c.sending.TryLock() {
		return
	}
	defer c.sending.Unlock()
	_ = c.conn.SetWriteDeadline(time.Now().Add(p.m.opts.Limits.Tick)) // as in send
	_ = c.packet(packetLast, pack(nil, msgPing, uint64(now), nil), nil)
}
