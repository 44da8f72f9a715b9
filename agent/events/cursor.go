package events

import (
	"bytes"
	"sort"

	"github.com/kvagent/kvagent/ipc"
)

const (
	maxBatchBytes = 512 << 10 // that one BLOCK_EVENTS tells, but for one block
	maxRunBytes   = 64 << 10  // of the tokens of a run
	runBytes      = 128       // at least what a run has besides tokens and extra
)

// cursor is where a subscriber is in one ledger. It was told of the live blocks up to the place
// told, and of the changes before seen, so it is to be told of later changes of the former: the
// blocks that it knows form whole chains from their roots.
type cursor struct {
	told uint64 // 0: of none
	seen uint64
}

// room is how much may still be told.
type room struct{ blocks, bytes int }

// event is that a block came to a medium or left it.
type event struct {
	l      *ledger
	n      uint32
	medium uint8
	stored bool
}

// missed reports whether the log lacks changes that the cursor is to be told.
func (l *ledger) missed(c *cursor) bool { return c.told > 0 && c.seen < l.first }

// take adds what a subscriber is to be told next, and reports whether that is all. A block is told
// stored after those before it in its chain, and removed after those that follow it.
func (l *ledger) take(c *cursor, r *room, out []event) (_ []event, all bool) {
	if c.told == 0 {
		c.seen = l.end()
	}
	for ; c.seen < l.end(); c.seen++ {
		one := l.log[c.seen-l.first]
		if one.since > c.told {
			continue
		}
		if !r.take(l.size(one.n)) {
			return out, false
		}
		out = append(out, event{l, one.n, one.medium, one.stored})
	}
	at := sort.Search(len(l.live), func(i int) bool { return l.live[i].since > c.told })
	for _, p := range l.live[at:] {
		if l.has(p) {
			if !r.take(media * l.size(p.n)) {
				return out, false
			}
			for m := range uint8(media) {
				if l.at(p.n).held&(1<<m) != 0 {
					out = append(out, event{l, p.n, m, true})
				}
			}
		}
		c.told = p.since
	}
	return out, true
}

// size returns at most how many bytes of a message tell of a block.
func (l *ledger) size(n uint32) int { return l.stride + runBytes + len(l.extras[n]) }

// take takes the room of a block, if there is some. The bytes may be exceeded once.
func (r *room) take(bytes int) bool {
	if r.blocks <= 0 || r.bytes <= 0 {
		return false
	}
	r.blocks--
	r.bytes -= bytes
	return true
}

// run is events of one kind and medium: stored blocks of a chain, or any removed ones.
type run struct {
	event  // of blocks[0]
	blocks []uint32
}

// runs joins events to runs. A run of stored blocks may go on after one in another medium began:
// the block before each of its blocks is in it. It does not go on after a removal, which may be of
// its next block.
func runs(list []event) (all []run) {
	var open [media]int // the last run in a medium, plus 1
	for _, e := range list {
		at := len(all)
		if e.stored {
			at = open[e.medium]
		}
		if at > 0 && all[at-1].takes(e) {
			all[at-1].blocks = append(all[at-1].blocks, e.n)
			continue
		}
		all = append(all, run{e, []uint32{e.n}})
		open[e.medium] = len(all)
	}
	return all
}

// takes reports whether an event may follow in the run.
func (r *run) takes(e event) bool {
	last := r.blocks[len(r.blocks)-1]
	if r.l != e.l || r.medium != e.medium || r.stored != e.stored || len(e.l.hash(last)) != len(e.l.hash(e.n)) {
		return false
	}
	return !e.stored || e.l.at(e.n).parent == last && e.l.extras[e.n] == e.l.extras[last] &&
		len(r.blocks)*e.l.stride < maxRunBytes
}

// wireMedium returns a medium as messages name it.
func (e event) wireMedium() uint8 { return e.medium + ipc.MediumMemory }

// message returns a run in the form in which it is sent.
func (r *run) message() ipc.EventRun {
	m := ipc.EventRun{
		Kind: ipc.EventRemoved, Medium: r.wireMedium(), Group: r.l.group, HashLen: uint8(len(r.l.hash(r.n))),
	}
	for _, n := range r.blocks {
		m.Hashes = append(m.Hashes, r.l.hash(n)...)
		if r.stored {
			m.Tokens = append(m.Tokens, r.l.tokens(n)...)
		}
	}
	if r.stored {
		m.Kind, m.Parent, m.Extra = ipc.EventStored, bytes.Clone(r.l.parent(r.n)), []byte(r.l.extras[r.n])
	}
	return m
}
