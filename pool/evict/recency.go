package evict

// recency is LRU with room for as many blocks as the pool has of a kind: all blocks that were used
// since its cutoff, which are young entries of the pool and lost blocks. It keeps no list of them
// but how many were last used in each span of time, so that LRU is known to a grain of blocks: it
// has room for fewer than a grain more, or after a drop fewer than a grain less.
//
//	time:   ── old entries ── │ span │ span │ span │ ... │ newest span
//	                          └ cutoff
type recency struct {
	spans      [maxSpans]span // from first to before end, the oldest first
	first, end int
	hint       int    // span that was asked for last
	last       uint32 // ms: no block was used later
	// ms: when the spans of the chain looked up last begin. They stay: blocks of it are about to be
	// stored ...
	opened uint32
	closed uint32 // ... and when the newest of them does
	grain  int    // blocks
	blocks int    // of all spans
	lost   int    // of them, blocks that the pool gave up and nobody has asked for since
}

// span is a time, and the blocks that were last used in it.
type span struct {
	from         uint32 // ms
	blocks, lost int32
}

const (
	maxSpans  = 1024
	grains    = 128          // of a pool
	mostSteps = maxSpans / 4 // ms that the blocks of one chain are spread over
	// ms after which LRU gives a block up however much room there is, so that times can be told
	// apart
	longestSight = 1 << 30
)

// begins has LRU begin anew, without blocks, just before a chain that is used now, and gives the
// lost ones that it had.
func (r *recency) restart(now uint32) (passed int) {
	passed = r.lost
	now -= mostSteps + 1
	r.spans[0] = span{from: now}
	r.first, r.end, r.hint, r.blocks, r.lost = 0, 1, 0, 0, 0
	r.last, r.opened, r.closed = now, now, now
	r.grain = max(1, r.grain)
	return passed
}

// cutoff is the time, ms, before which LRU has nothing.
func (r *recency) cutoff() uint32 { return r.spans[r.first].from }

// newest is when the newest span began.
func (r *recency) newest() uint32 { return r.spans[r.end-1].from }

// has says that LRU has a block that was used then.
func (r *recency) has(used uint32) bool { return !before(used, r.cutoff()) }

// notBefore is a time, or the cutoff if that is later.
func (r *recency) notBefore(used uint32) uint32 {
	if !r.has(used) {
		return r.cutoff()
	}
	return used
}

// before says that a is earlier than b; both are times in ms that are less than 24 days apart.
func before(a, b uint32) bool { return int32(a-b) < 0 }

// step is the blocks of a chain that are taken to be used in one ms, from its end to its start.
func (r *recency) step(length int) int { return max(r.grain, (length+mostSteps-1)/mostSteps) }

// open begins the spans in which the blocks of a look-up are last used: step blocks at each ms
// until now.
func (r *recency) open(blocks, step int, now uint32) {
	steps := uint32((blocks - 1) / step)
	r.opened, r.closed = now-steps, now
	for at := now - steps; ; at++ {
		if (steps > 0 || int(r.spans[r.end-1].blocks) >= r.grain) && before(r.last, at) {
			r.begin(at)
		}
		if at == now {
			return
		}
	}
}

func (r *recency) begin(at uint32) {
	if r.end == maxSpans {
		r.merge()
	}
	r.spans[r.end] = span{from: at}
	r.end++
	r.last = at
}

// merge makes neighbours one that have few blocks by now, and twice as many if that leaves too many
// spans. Those of the chain looked up last are about to have more.
func (r *recency) merge() {
	for most := int32(r.grain); r.first > 0 || r.end > maxSpans/2; most *= 2 {
		n := 1
		first := r.first
		r.spans[0] = r.spans[first]
		for _, s := range r.spans[first+1 : r.end] {
			if last := &r.spans[n-1]; before(s.from, r.opened) && last.blocks+s.blocks <= most {
				last.blocks += s.blocks
				last.lost += s.lost
				continue
			}
			r.spans[n] = s
			n++
		}
		r.first, r.end, r.hint = 0, n, 0
	}
}

// at is the span of a time that is not before the cutoff.
func (r *recency) at(used uint32) *span {
	if s := &r.spans[r.end-1]; !before(used, s.from) {
		return s
	}
	if h := r.hint; h >= r.first && h+1 < r.end && !before(used, r.spans[h].from) && before(used, r.spans[h+1].from) {
		return &r.spans[h]
	}
	low, high := r.first, r.end-1 // the span is at low or behind it, and before high
	for high-low > 1 {
		middle := int(uint(low+high) / 2)
		if before(used, r.spans[middle].from) {
			high = middle
		} else {
			low = middle
		}
	}
	r.hint = low
	return &r.spans[low]
}

// add takes in a block that was used then; one that was lost stays that if it is not stored yet.
func (r *recency) add(used uint32) {
	if before(r.last, used) {
		r.last = used
	}
	r.at(used).blocks++
	r.blocks++
}

// remove forgets a block.
func (r *recency) remove(used uint32) {
	r.at(used).blocks--
	r.blocks--
}

// lose notes that the pool gives a block up, by one or, with -1, that one that was lost is asked
// for or stored.
func (r *recency) lose(used uint32, by int) {
	r.at(used).lost += int32(by)
	r.lost += by
}

// drop gives up the blocks of the oldest span, and says how many were lost ones; false if there is
// but the newest, or those of the chain looked up last.
func (r *recency) drop() (passed int, ok bool) {
	if !r.canDrop() {
		return 0, false
	}
	s := &r.spans[r.first]
	r.first++
	r.blocks -= int(s.blocks)
	r.lost -= int(s.lost)
	return int(s.lost), true
}

// may says that there is a span to drop.
func (r *recency) canDrop() bool {
	return r.end-r.first > 1 && !before(r.opened, r.spans[r.first+1].from)
}

// justLooked says that a time is one of the chain looked up last, of those that are in several
// spans.
func (r *recency) justLooked(used uint32) bool {
	return !before(used, r.opened) && before(used, r.closed)
}

// over says that LRU has its room without the oldest span, or has seen nothing of that for too
// long.
func (r *recency) overfull(room int, now uint32) bool {
	return r.canDrop() && (r.blocks-int(r.spans[r.first].blocks) >= room || now-r.cutoff() > longestSight)
}
