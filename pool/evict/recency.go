package evict

// recency simulates LRU with the pool's room for a kind: all blocks used since its cutoff, which
// are the young entries of the pool and lost blocks. It stores no list of them, only the number
// last used in each span of time. So LRU is known to a grain of blocks: it has room for less than a
// grain more or, after a drop, less than a grain fewer.
//
//	time:   ── old entries ── │ span │ span │ span │ ... │ newest span
//	                          └ cutoff
type recency struct {
	spans      [maxSpans]span // from first to before end, the oldest first
	first, end int
	hint       int    // span that was asked for last
	last       uint32 // ms: no block was used later
	// ms: start of the spans of the chain looked up last. They stay, because blocks of the chain
	// are about to be stored ...
	opened uint32
	closed uint32 // ... and when the newest of them does
	grain  int    // blocks
	blocks int    // of all spans
	lost   int    // of them, evicted by the pool and not asked for since
}

// span is a span of time, and the number of blocks last used in it.
type span struct {
	from         uint32 // ms
	blocks, lost int32
}

const (
	maxSpans  = 1024
	grains    = 128          // of a pool
	mostSteps = maxSpans / 4 // ms that the blocks of one chain are spread over
	// ms after which LRU drops a block in any case, so that times can be compared
	longestSight = 1 << 30
)

// restart empties LRU just before a chain that is used now, and returns the number of its lost
// blocks.
func (r *recency) restart(now uint32) (passed int) {
	passed = r.lost
	now -= mostSteps + 1
	r.spans[0] = span{from: now}
	r.first, r.end, r.hint, r.blocks, r.lost = 0, 1, 0, 0, 0
	r.last, r.opened, r.closed = now, now, now
	r.grain = max(1, r.grain)
	return passed
}

// cutoff returns the time, ms, before which LRU has nothing.
func (r *recency) cutoff() uint32 { return r.spans[r.first].from }

// newest returns the start of the newest span.
func (r *recency) newest() uint32 { return r.spans[r.end-1].from }

// has reports whether LRU has a block last used at this time.
func (r *recency) has(used uint32) bool { return !before(used, r.cutoff()) }

// notBefore returns the later of a time and the cutoff.
func (r *recency) notBefore(used uint32) uint32 {
	if !r.has(used) {
		return r.cutoff()
	}
	return used
}

// before reports whether a is earlier than b, for times in ms less than 24 days apart.
func before(a, b uint32) bool { return int32(a-b) < 0 }

// step returns how many blocks of a chain count as used in one ms, from its end to its start.
func (r *recency) step(length int) int { return max(r.grain, (length+mostSteps-1)/mostSteps) }

// open begins the spans for the blocks of a look-up: step blocks at each ms until now.
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

// merge merges neighbouring spans with few blocks, or up to twice as many if there are too many
// spans. It leaves those of the chain looked up last, which are about to get more.
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

// at returns the span of a time that is not before the cutoff.
func (r *recency) at(used uint32) *span {
	if s := &r.spans[r.end-1]; !before(used, s.from) {
		return s
	}
	if h := r.hint; h >= r.first && h+1 < r.end && !before(used, r.spans[h].from) && before(used, r.spans[h+1].from) {
		return &r.spans[h]
	}
	low, high := r.first, r.end-1 // the span is in [low, high)
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

// add adds a block last used at this time. A lost block that is not stored yet remains lost.
func (r *recency) add(used uint32) {
	if before(r.last, used) {
		r.last = used
	}
	r.at(used).blocks++
	r.blocks++
}

// remove removes a block.
func (r *recency) remove(used uint32) {
	r.at(used).blocks--
	r.blocks--
}

// lose counts a block that the pool evicted and LRU has; -1 if a lost block is asked for or stored.
func (r *recency) lose(used uint32, by int) {
	r.at(used).lost += int32(by)
	r.lost += by
}

// drop drops the blocks of the oldest span, and returns how many of them were lost; ok is false if
// only the newest span, or those of the chain looked up last, remain.
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

// canDrop reports whether there is a span to drop.
func (r *recency) canDrop() bool {
	return r.end-r.first > 1 && !before(r.opened, r.spans[r.first+1].from)
}

// justLooked reports whether a time is within the spans of the chain looked up last, if it has
// several.
func (r *recency) justLooked(used uint32) bool {
	return !before(used, r.opened) && before(used, r.closed)
}

// overfull reports whether LRU has enough blocks without the oldest span, or the span is too old.
func (r *recency) overfull(room int, now uint32) bool {
	return r.canDrop() && (r.blocks-int(r.spans[r.first].blocks) >= room || now-r.cutoff() > longestSight)
}
