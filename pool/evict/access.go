package evict

import "github.com/kvagent/kvagent/pool"

// maxGap is the longest gap of unknown blocks in a chain that still counts as known.
const maxGap = 4

// ghostRef is the place of a missing block's ghost; way is -1 if it has none.
type ghostRef struct {
	set *ghostSet
	way int
}

// Access implements pool.Policy. A repeated look-up of a recent chain counts as the same request,
// and nothing is learned from it.
func (h *Hazard) Access(u *pool.Use) {
	length := len(u.Prints)
	if length == 0 {
		return
	}
	h.nodes.preload(u.Entries)
	h.missing = 0
	if len(u.Entries) < length {
		h.missing = u.Prints[len(u.Entries)]
	}
	known, gap := h.findGhosts(u, h.clock.peek(u.Now))
	k, step := h.kindOf(u), length
	if k != nil {
		step = k.recency.step(length)
	}
	now := h.clock.advanceBy(u, (length-1)/step+1)
	if k != nil {
		h.restartIdle(k, now)
		k.recency.open(length, step, now)
	}
	ago := h.lastAsked(u, now)
	missed := h.countMisses(len(u.Entries), step, now)
	if ago < askedAgain {
		h.settleLookup(u, k, missed, h.renew(u, step, now), ago < askedAtOnce)
		return
	}
	t := traits(length, known, u.BlockTokens, gap)
	for i := length - 1; i >= len(u.Entries); i-- {
		h.await(u.Prints[i], i, i-len(u.Entries), &t, now-uint32(i/step))
	}
	won := 0
	for i := len(u.Entries) - 1; i >= 0; i-- {
		if n := h.nodes.match(u.Entries[i], u.Prints[i]); n != nil {
			won += h.use(u.Entries[i], n, i, &t, now-uint32(i/step))
		}
	}
	h.settleLookup(u, k, missed, won, false)
	h.tables.fade()
	h.age(now, length)
	h.sweep(now, length)
	h.score(length)
}

// lastAsked returns the ms since the chain was looked up.
func (h *Hazard) lastAsked(u *pool.Use, now uint32) uint32 {
	last := len(u.Prints) - 1
	if len(u.Entries) <= last {
		return h.recent.last(u.Prints[last], last, now)
	}
	if n := h.nodes.match(u.Entries[last], u.Prints[last]); n != nil {
		return now - h.nodes.runOf(n).used
	}
	return askedAgain
}

// renew makes the entries of a chain the newest of their classes, and returns how many of them LRU
// would not have. It counts no uses.
func (h *Hazard) renew(u *pool.Use, step int, now uint32) (won int) {
	for i, g := range h.misses {
		if g.way >= 0 && g.set.info[g.way]&ghostRecent != 0 {
			g.set.way[g.way].used = now - uint32((len(u.Entries)+i)/step)
			g.set.info[g.way] = g.set.info[g.way].withBin(0)
		}
	}
	for i := len(u.Entries) - 1; i >= 0; i-- {
		if n := h.nodes.match(u.Entries[i], u.Prints[i]); n != nil {
			won += h.refresh(u.Entries[i], n, h.nodes.runOf(n).class, now-uint32(i/step))
		}
	}
	return won
}

// refresh makes an entry the newest of a class and of LRU. It returns 1 if LRU would not have it,
// else 0.
func (h *Hazard) refresh(e uint32, n *node, class uint16, now uint32) (won int) {
	k, r := h.kinds[n.kind], h.nodes.runOf(n)
	if r.half == young && k.recency.has(r.used) {
		k.recency.remove(r.used)
	} else {
		won = 1
	}
	k.take(&h.nodes, &h.worths, n)
	k.recency.add(k.put(&h.nodes, &h.worths, e, n, class, now, nil))
	return won
}

// findGhosts finds the ghosts of the missing blocks. known is the number of leading blocks that are
// stored or remembered without a gap; gap is the class of the time since the deepest was used.
func (h *Hazard) findGhosts(u *pool.Use, now uint32) (known int, gap uint8) {
	h.misses = h.misses[:0]
	known = len(u.Entries)
	if known > 0 {
		if n := h.nodes.match(u.Entries[known-1], u.Prints[known-1]); n != nil {
			gap = gapOf(now - h.nodes.runOf(n).used)
		}
	}
	for i, print := range u.Prints[known:] {
		s, w := h.ghosts.find(print)
		h.misses = append(h.misses, ghostRef{s, w})
		if w >= 0 {
			known, gap = len(u.Entries)+i+1, gapOf(now-s.way[w].used)
		} else if i+len(u.Entries) >= known+maxGap {
			break
		}
	}
	h.misses = h.misses[:known-len(u.Entries)]
	return known, gap
}

// use counts a use of a stored block and makes it the newest of its new class. It returns 1 if LRU
// would not have it, else 0.
func (h *Hazard) use(e uint32, n *node, i int, t *chainTraits, now uint32) (won int) {
	r := h.nodes.runOf(n)
	b := max(int(r.bin), binOf(now-r.used))
	h.tables.enter(r.class, int(r.bin), b, 1)
	h.tables.use(r.class, b)
	class := t.class(i, min(usesOf(r.class)+1, maxUses))
	h.tables.enter(class, -1, 0, 1)
	return h.refresh(e, n, class, now)
}

// await records the class that a missing block will have when it is stored, and counts the use of
// its ghost.
func (h *Hazard) await(print uint64, i, missing int, t *chainTraits, now uint32) {
	uses := uint8(0)
	if missing < len(h.misses) {
		uses = 1 // unknown, but blocks after it are known
		if g := h.misses[missing]; g.way >= 0 {
			info := g.set.info[g.way]
			b := max(info.bin(), binOf(now-g.set.way[g.way].used))
			h.tables.enter(info.class(), info.bin(), b, 1)
			h.tables.use(info.class(), b)
			class := t.class(i, min(info.uses()+1, maxUses))
			h.tables.enter(class, -1, 0, 1)
			g.set.info[g.way] = makeInfo(class, 0) | ghostAwaited | info&(ghostRecent|ghostPaid)
			g.set.way[g.way].used = now
			return
		}
	}
	h.awaited.put(print, t.class(i, uses))
}

// sweep ages some ghosts, in turn.
func (h *Hazard) sweep(now uint32, blocks int) {
	g := &h.ghosts
	for g.owed += blocks * sweepABlock; g.owed >= ways; g.owed -= ways {
		if g.hand++; g.hand >= g.sets {
			g.hand = 0
		}
		h.ageSet(g.at(g.hand), now)
	}
}

// ageSet treats ghosts that stay in their bin like those that leave it: about half of them do, and
// a mispredicted branch takes longer than a count of 0.
func (h *Hazard) ageSet(s *ghostSet, now uint32) {
	for w, info := range s.info {
		if info == 0 {
			continue
		}
		from := info.bin()
		b := max(from, binOf(now-s.way[w].used))
		h.tables.enter(info.class(), from, b, 1)
		info = info.withBin(b)
		if b == numBins-1 && now-s.way[w].used > longestSight {
			info &^= ghostRecent | ghostPaid
		}
		s.info[w] = info
	}
}

const (
	askedAgain   = 5000 // ms within which the same chain is taken for the same request ...
	askedAtOnce  = 500  // ... and ms within which it certainly is: schedulers ask at every step
	recentChains = 1024
)

// recent are the last chains looked up, by their ends, because schedulers ask for a request
// repeatedly.
type recent [recentChains]struct {
	end  uint64
	used uint32 // ms
}

// last records a chain, and returns the ms since it was recorded before; askedAgain if it was not.
func (r *recent) last(end uint64, length int, now uint32) (ago uint32) {
	end ^= uint64(length) * 0x9e3779b97f4a7c15
	c := &r[end%recentChains]
	if ago = askedAgain; c.end == end {
		ago = now - c.used
	}
	c.end, c.used = end, now
	return ago
}
