package events

import (
	"math/bits"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
)

// Limits of one space.
const (
	maxSubscribers = 60      // sessions that are told; a further one is refused
	maxBlockTokens = 1 << 14 // of a block; groups with more are not told
	holdsStride    = 256     // blocks looked up by one call of the pool
	compareStride  = 1 << 12
	maxUnkept      = 16 << 20 // bytes that wait for the file; with more it is made anew
	messageBytes   = 256      // of them, what a message takes besides its longer fields
)

// space has what subscribers of one space are told. The desk's lock guards it.
type space struct {
	desk    *Desk
	id      pool.SpaceID
	print   pool.Fingerprint
	epoch   uint32    // of memory; with another one, nothing of before is held
	ledgers []*ledger // of the groups whose blocks are not too large
	subs    map[uint64]*subscriber
	blob    []byte

	anew        bool               // the file of tokens is to be made anew
	unkept      []*ipc.BlockTokens // that are to be written to it
	unkeptBytes int
}

// subscriber is a session that is told.
type subscriber struct {
	bit     uint64   // its own in block.told
	cursors []cursor // one for each ledger
	req     uint32   // its last request
	most    int      // blocks that it asked for and that were not sent; 0: it has not asked
	told    bool     // of some blocks
	whole   bool     // its last answer said that it has been told everything
	void    bool     // it is to be told that nothing holds of what it was told
	send    func(any)
}

func newSpace(d *Desk, rules *lookup.Space, l limits) *space {
	sp := &space{
		desk: d, id: rules.ID, print: rules.Print, epoch: d.memory.Epoch(rules.ID), subs: map[uint64]*subscriber{},
	}
	for g := range rules.Groups {
		if tokens := rules.Groups[g].BlockTokens; tokens <= maxBlockTokens {
			sp.ledgers = append(sp.ledgers, newLedger(uint8(g), tokens, l))
		}
	}
	return sp
}

// ledger returns a group's, or nil.
func (sp *space) ledger(group uint8) *ledger {
	for _, l := range sp.ledgers {
		if l.group == group {
			return l
		}
	}
	return nil
}

// learn records the tokens of a run of chained blocks, which the file may have. It returns how many
// of them are not told.
func (sp *space) learn(m *ipc.BlockTokens, kept bool) (refused int) {
	size := int(m.HashLen)
	n := len(m.Hashes) / size
	sp.follow() // what is said after a reset must not be forgotten for it
	l := sp.ledger(m.Group)
	if l == nil || len(m.Tokens) != n*l.stride {
		return n
	}
	parent, anyFresh := m.Parent, false
	for i := range n {
		hash := m.Hashes[i*size : (i+1)*size]
		number, fresh := l.add(hash, parent, m.Tokens[i*l.stride:(i+1)*l.stride], m.Extra)
		if number != 0 {
			l.asked = append(l.asked, number)
		} else {
			refused++
		}
		anyFresh = anyFresh || fresh
		parent = hash
	}
	if anyFresh && !kept {
		sp.keep(m)
	}
	sp.lookUp(l)
	return refused
}

// keep has tokens written to the file, unless it is made anew, which has all.
func (sp *space) keep(m *ipc.BlockTokens) {
	if sp.desk.keeper == nil || sp.anew {
		return
	}
	sp.unkept = append(sp.unkept, m)
	if sp.unkeptBytes += messageBytes + len(m.Hashes) + len(m.Tokens) + len(m.Extra); sp.unkeptBytes > maxUnkept {
		sp.renew()
	}
	sp.desk.keeper.signal()
}

// renew has the file of tokens made anew.
func (sp *space) renew() { sp.anew, sp.unkept, sp.unkeptBytes = true, nil, 0 }

// lookUp finds out which media hold the blocks asked for, and tells it. It asks the upper one
// first: a block that leaves it for the lower one is found in the lower one. Of a space that was
// closed it learns nothing: its blocks may be held when it is opened again.
func (sp *space) lookUp(l *ledger) {
	rest, looked := l.asked, len(l.asked)
	l.asked = l.asked[:0]
	for len(rest) > 0 {
		var present [holdsStride]bool
		var found [holdsStride]held
		length, n := len(l.hash(rest[0])), 0
		for sp.blob = sp.blob[:0]; n < min(len(rest), holdsStride) && len(l.hash(rest[n])) == length; n++ {
			sp.blob = append(sp.blob, l.hash(rest[n])...)
		}
		for m, journal := range sp.desk.media {
			if journal == nil {
				continue
			}
			if !journal.Holds(sp.id, l.group, pool.Chain(sp.blob, length), present[:n]) {
				return
			}
			for i, there := range present[:n] {
				if there {
					found[i] |= 1 << m
				}
			}
		}
		for i, number := range rest[:n] {
			l.set(number, found[i])
		}
		rest = rest[n:]
	}
	l.trim(looked) // not before, which may forget what is to be looked up
	sp.serve()
}

// ask has a block looked up, if it is known.
func (sp *space) ask(group uint8, h *pool.Hash) {
	if l := sp.ledger(group); l != nil {
		if n := l.get(h.Bytes[:h.Len]); n != 0 {
			l.asked = append(l.asked, n)
		}
	}
}

// comparePart looks up some blocks of a group, because any may have changed, and reports whether
// there are more.
func (sp *space) comparePart(l *ledger, from uint32) (more bool) {
	to := min(l.high, from+compareStride)
	for n := from; n < to; n++ {
		if len(l.hash(n)) > 0 {
			l.asked = append(l.asked, n)
		}
	}
	sp.lookUp(l)
	return to < l.high
}

// follow begins with new ledgers after a reset, or the end of the space: nothing of before is held.
func (sp *space) follow() {
	epoch := sp.desk.memory.Epoch(sp.id)
	if epoch == sp.epoch {
		return
	}
	sp.epoch = epoch
	sp.renew()
	for i, l := range sp.ledgers {
		sp.ledgers[i] = newLedger(l.group, uint32(l.stride/tokenBytes), l.limits)
	}
	for _, sub := range sp.subs {
		sp.begin(sub)
	}
	sp.desk.keeper.signal()
	sp.serve()
}

// begin makes a subscriber one that was told nothing.
func (sp *space) begin(sub *subscriber) {
	sub.cursors = sub.cursors[:0]
	for _, l := range sp.ledgers {
		l.untell(sub.bit)
		sub.cursors = append(sub.cursors, cursor{l.end(), 1})
	}
	sub.void, sub.told, sub.whole = sub.void || sub.told, false, false
}

// next serves a subscriber's request, for at most this many blocks; 0: it is not answered. It
// returns false if there are too many subscribers.
func (sp *space) next(session uint64, req uint32, most int, anew bool, send func(any)) bool {
	sub := sp.subs[session]
	if sub == nil {
		if len(sp.subs) == maxSubscribers {
			return false
		}
		var used uint64
		for _, other := range sp.subs {
			used |= other.bit
		}
		sub = &subscriber{bit: 1 << bits.TrailingZeros64(^used), send: send}
		sp.subs[session] = sub
		anew = true
	}
	if anew {
		sp.begin(sub)
		sub.void = false
	}
	sub.req, sub.most = req, min(most, ipc.MaxEventBlocks/media)
	sp.answer(sub)
	return true
}

// serve answers all subscribers that wait for something to be told.
func (sp *space) serve() {
	for _, sub := range sp.subs {
		sp.answer(sub)
	}
}

// answer sends a subscriber what it is to be told next, if it has asked and there is something.
func (sp *space) answer(sub *subscriber) {
	if sub.most == 0 {
		return
	}
	for _, l := range sp.ledgers {
		if l.lost&sub.bit != 0 {
			sp.desk.gaps++
			sp.begin(sub)
		}
	}
	m := &ipc.BlockEvents{Req: sub.req, State: ipc.EventsMore}
	if sub.void {
		m.State, sub.void = ipc.EventsVoid, false
	} else {
		var list []event
		all, r := true, room{sub.most, maxBatchBytes, maxLooks}
		for i, l := range sp.ledgers {
			if all {
				list, all = l.take(sub.bit, &sub.cursors[i], &r, list)
			}
		}
		if len(list) == 0 && all && sub.whole {
			return
		}
		for _, r := range runs(list) {
			m.Runs = append(m.Runs, r.message())
		}
		sub.told = sub.told || len(list) > 0
		if sub.whole = all; all {
			m.State = ipc.EventsWhole
		}
	}
	sub.most = 0
	sub.send(m)
}
