package hints

import (
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
)

// Serve serves HINT, with the rules of the session's open space. Without one, its actions are
// rejected. It returns false for another message.
func (l *Ledger) Serve(rules *lookup.Space, msg any, send func(any)) bool {
	m, ok := msg.(*ipc.Hint)
	if !ok {
		return false
	}
	receipts, answered := reject(m, "no space is registered"), make(chan struct{})
	defer close(answered) // what is over already is told after that it was deferred
	if rules != nil {
		h := fromMessage(m, rules.ID)
		h.Later = func(r Receipt) {
			<-answered
			send(message(m.Req, r))
		}
		receipts = l.Told(h)
	} else {
		l.mu.Lock()
		l.mu.count.Ignored++
		l.mu.Unlock()
	}
	if len(receipts) > 0 {
		send(message(m.Req, receipts...))
	}
	return true
}

// fromMessage returns what an engine tells. The hashes lie in the message.
func fromMessage(m *ipc.Hint, s pool.SpaceID) *Hint {
	h := &Hint{Space: s, Session: m.Session, Part: m.Req, Finish: pool.Finish(m.Finish), Output: m.Output}
	for i := range m.Actions {
		a := &m.Actions[i]
		h.Actions = append(h.Actions, Action{
			ID: a.ID, Kind: Kind(a.Kind), Priority: a.Priority, Peer: a.Peer,
			For: time.Duration(a.MS) * time.Millisecond,
		})
	}
	for i := range m.Chains {
		c := &m.Chains[i]
		h.Chains = append(h.Chains, Chain{Group: c.Group, Hashes: pool.Chain(c.Hashes, int(c.HashLen)), Own: c.Own})
	}
	return h
}

// reject returns a receipt for each action of a hint that nothing carries out.
func reject(m *ipc.Hint, why string) (all []Receipt) {
	for i := range m.Actions {
		a := &m.Actions[i]
		all = append(all, Receipt{ID: a.ID, Kind: Kind(a.Kind), State: Rejected, Reason: why})
	}
	return all
}

// message returns receipts as an engine gets them.
func message(req uint32, all ...Receipt) *ipc.Hinted {
	m := &ipc.Hinted{Req: req}
	for i := range all {
		r := &all[i]
		m.Receipts = append(m.Receipts, ipc.HintReceipt{
			ID: r.ID, Kind: uint8(r.Kind), State: uint8(r.State), Blocks: uint32(r.Blocks), Bytes: uint64(r.Bytes),
			Reason: r.Reason,
		})
	}
	return m
}
