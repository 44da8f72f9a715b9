package events

import (
	"math/bits"
	"sync"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
)

// Limits of one space.
const (
	maxSubscribers = 60      // sessions that are told; a further one is refused. The other bits are tails'
	maxBlockTokens = 1 << 14 // of a block; groups with more are not told
	holdsStride    = 256     // blocks looked up by one call of the pool
	compareStride  = 1 << 12
)

// space has what subscribers of one space are told. Its lock is taken before the pool's, and by
// nothing that saves, loads or looks up.
type space struct {
	id     pool.SpaceID
	print  pool.Fingerprint
	memory Memory
	media  [media]pool.Journal // memory, and the storage below it or nil

	mu      sync.Mutex
	ledgers []*ledger // by group; nil: its blocks are too large
	subs    map[uint64]*subscriber
	bits    uint64 // of subscribers
	tails   map[*Tail]bool
	asked   []asked
	blob    []byte
	present []bool
	found   []held

	epoch    uint32 // that is compared with memory's
	clearing bool   // the epoch is over, and not all blocks have been looked up since
	clears   int    // ends of epochs
}

// asked is a block whose state is to be looked up.
type asked struct {
	ledger *ledger
	hash   pool.Hash
	n      uint32
}

// subscriber is a session that is told.
type subscriber struct {
	bit     uint64
	cursors []cursor // by group
	req     uint32   // its last request
	most    int      // blocks that it asked for and that were not sent; 0: it has not asked
	whole   bool     // its last answer said that it has been told everything
	send    func(any)
}

func newSpace(rules *lookup.Space, memory Memory, l limits) *space {
	sp := &space{
		id: rules.ID, print: rules.Print, memory: memory, media: mediaOf(memory),
		subs: map[uint64]*subscriber{}, tails: map[*Tail]bool{}, epoch: memory.Epoch(rules.ID),
	}
	for g := range rules.Groups {
		var one *ledger
		if tokens := rules.Groups[g].BlockTokens; tokens <= maxBlockTokens {
			one = newLedger(uint8(g), tokens, l)
		}
		sp.ledgers = append(sp.ledgers, one)
	}
	return sp
}

// ledger returns a group's, or nil.
func (sp *space) ledger(group uint8) *ledger {
	if int(group) >= len(sp.ledgers) {
		return nil
	}
	return sp.ledgers[group]
}

// learn records the tokens of a run of chained blocks. It returns how many of them are not told,
// and how many were not in the file of tokens.
func (sp *space) learn(m *ipc.BlockTokens) (refused, fresh int) {
	n := len(m.Hashes) / int(m.HashLen)
	l := sp.ledger(m.Group)
	if l == nil || len(m.Tokens) != n*l.stride {
		return n, 0
	}
	sp.mu.Lock()
	defer sp.mu.Unlock()
	parent := pool.MakeHash(m.Parent)
	for i := range n {
		h := pool.MakeHash(m.Hashes[i*int(m.HashLen) : (i+1)*int(m.HashLen)])
		if !l.add(h, parent, m.Tokens[i*l.stride:(i+1)*l.stride], m.Extra) {
			refused++
		} else if n := l.index[h]; n != 0 { // it was not forgotten at once
			sp.ask(l, n)
			if b := l.at(n); !b.is(flagKept) {
				b.flags |= flagKept
				fresh++
			}
		}
		parent = h
	}
	sp.lookUp()
	sp.serve()
	return refused, fresh
}

// ask adds a block to those that lookUp looks up.
func (sp *space) ask(l *ledger, n uint32) {
	next := asked{l, l.at(n).hash, n}
	if len(sp.asked) == holdsStride || len(sp.asked) > 0 && !sp.asked[0].alike(&next) {
		sp.lookUp()
	}
	sp.asked = append(sp.asked, next)
}

// alike reports whether one call of the pool can name both blocks.
func (a *asked) alike(b *asked) bool { return a.ledger == b.ledger && a.hash.Len == b.hash.Len }

// lookUp finds out which media hold the blocks asked for. It asks the upper one first: a block that
// leaves it for the lower one is found in the lower one.
func (sp *space) lookUp() {
	if len(sp.asked) == 0 {
		return
	}
	l, length := sp.asked[0].ledger, int(sp.asked[0].hash.Len)
	sp.blob = sp.blob[:0]
	for i := range sp.asked {
		sp.blob = append(sp.blob, sp.asked[i].hash.Bytes[:length]...)
	}
	if sp.present == nil {
		sp.present, sp.found = make([]bool, holdsStride), make([]held, holdsStride)
	}
	clear(sp.found)
	for m, journal := range sp.media {
		if journal == nil {
			continue
		}
		journal.Holds(sp.id, l.group, pool.Chain(sp.blob, length), sp.present[:len(sp.asked)])
		for i := range sp.asked {
			if sp.present[i] {
				sp.found[i] |= 1 << m
			}
		}
	}
	for i := range sp.asked {
		if a := &sp.asked[i]; l.index[a.hash] == a.n { // it was not forgotten meanwhile
			l.set(a.n, sp.found[i])
		}
	}
	sp.asked = sp.asked[:0]
}

// changed looks up blocks that a medium noted.
func (sp *space) changed(list []pool.Change) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	for i := range list {
		if l := sp.ledger(list[i].Group); l != nil {
			if n := l.index[list[i].Hash]; n != 0 {
				sp.ask(l, n)
			}
		}
	}
	sp.lookUp()
	sp.serve()
}

// takeUnkept returns the tokens of blocks that came to be held since the last call, and are not in
// the file of tokens. more: there are too many.
func (sp *space) takeUnkept() (said []*ipc.BlockTokens, more bool) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	for _, l := range sp.ledgers {
		if l != nil {
			var over bool
			said, over = l.saidUnkept(said)
			more = more || over
		}
	}
	return said, more
}

// compare looks up all blocks, because any may have changed. It reports whether the space is open,
// and whether it was reset or closed.
func (sp *space) compare() (open, cleared bool) {
	open = sp.isOpen()
	sp.newEpoch(sp.memory.Epoch(sp.id))
	for _, l := range sp.ledgers {
		for from := uint32(1); l != nil && from != 0; {
			from = sp.comparePart(l, from)
		}
	}
	return open, sp.compared()
}

// isOpen reports whether the space is open. None opens again.
func (sp *space) isOpen() bool { return sp.memory.Holds(sp.id, 0, pool.Hashes{Len: 1}, nil) }

// newEpoch begins a comparison. Memory's epoch tells a reset from other reasons for it.
func (sp *space) newEpoch(epoch uint32) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	if epoch != sp.epoch {
		sp.epoch, sp.clearing = epoch, true
	}
}

// compared ends a comparison, and reports whether it was of a reset.
func (sp *space) compared() (cleared bool) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	if cleared = sp.clearing; cleared {
		sp.clearing = false
		sp.clears++
		sp.serve()
	}
	return cleared
}

// comparePart looks up a part of the blocks, so that others wait for the lock only as long, and
// returns the block to continue at, 0 at the end.
func (sp *space) comparePart(l *ledger, from uint32) (next uint32) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	to := min(l.high, from+compareStride)
	for n := from; n < to; n++ {
		if l.at(n).hash.Len != 0 {
			sp.ask(l, n)
		}
	}
	sp.lookUp()
	sp.serve()
	if to < l.high {
		return to
	}
	return 0
}

// next serves a subscriber's request, for at most this many blocks; 0: it is not answered. It
// returns false if there are too many subscribers.
func (sp *space) next(session uint64, req uint32, most int, anew bool, send func(any)) bool {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	sub := sp.subs[session]
	if sub == nil {
		free := bits.TrailingZeros64(^sp.bits)
		if free >= maxSubscribers {
			return false
		}
		sub = &subscriber{bit: 1 << free, cursors: make([]cursor, len(sp.ledgers)), send: send}
		sp.bits |= sub.bit
		sp.subs[session] = sub
		anew = true
	}
	if anew {
		sp.beginAgain(sub)
	}
	sub.req, sub.most = req, most
	sp.answer(sub)
	return true
}

func (sp *space) beginAgain(sub *subscriber) {
	sub.whole = false
	for g, l := range sp.ledgers {
		if l != nil {
			l.withdraw(sub.bit)
			l.begin(&sub.cursors[g])
		}
	}
}

// leave ends a subscription.
func (sp *space) leave(session uint64) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	sub := sp.subs[session]
	if sub == nil {
		return
	}
	sp.beginAgain(sub)
	sp.bits &^= sub.bit
	delete(sp.subs, session)
}

// serve answers all subscribers that wait for something to be told.
func (sp *space) serve() {
	for t := range sp.tails {
		t.signal()
	}
	for _, sub := range sp.subs {
		sp.answer(sub)
	}
}

// answer sends a subscriber what it is to be told next, if it has asked and there is something.
func (sp *space) answer(sub *subscriber) {
	if sub.most == 0 {
		return
	}
	out := newBatch(sub.most)
	all := sp.take(sub.cursors, sub.bit, out)
	if len(out.runs) == 0 && all && sub.whole {
		return
	}
	m := &ipc.BlockEvents{Req: sub.req, State: ipc.EventsMore, Runs: out.runs}
	if sub.whole = all; all {
		m.State = ipc.EventsWhole
	}
	sub.most = 0
	sub.send(m)
}

// take adds to a batch what a subscriber is to be told next, and reports whether that is all.
func (sp *space) take(cursors []cursor, bit uint64, out *batch) bool {
	for g, l := range sp.ledgers {
		if l != nil && !l.take(&cursors[g], bit, out) {
			return false
		}
	}
	return true
}

// report adds the space's numbers.
func (sp *space) report(r *Report) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	r.Subscribers += len(sp.subs)
	for _, l := range sp.ledgers {
		if l != nil {
			r.Blocks += len(l.index)
			for m, blocks := range l.reachable {
				r.Told[m] += blocks
			}
			r.Bytes += l.bytes()
			r.Gaps += l.gaps
		}
	}
}
