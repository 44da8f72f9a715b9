package evict

// Strength of the prior, in blocks.
const (
	flatHazard   = 0.05 // chance of a use in a bin: the same in each, so that the older is worth less, as in LRU
	minFlat      = 100  // blocks; or as many as the pool holds
	ratioPrior   = 30
	onceRatio    = 0.5 // hazard of blocks that never came again beside the flat one ...
	againRatio   = 4   // ... and of those that did
	hazardPrior  = 1500
	maxHazard    = 0.999 // a hazard of 1 would leave no block in the next bin
	minReach     = 1e-6  // share that is taken to reach any bin, so that slopes there still differ
	blocksARound = 2048  // blocks looked up in a round, at least
	blocksAScore = 12    // blocks looked up between the score of one class and of the next
	maxScores    = 4     // classes scored at one look-up
	classesATurn = 32    // classes examined to find one to score
	freshShare   = 0.02  // of the blocks that a class is judged by: fewer new ones can wait ...
	waitRounds   = 8     // ... for so many rounds at most
)

// scorer converts counts to worths, one class at a time, so that no look-up waits for all of them.
type scorer struct {
	flat    [numBins]float64 // chance of a use in a bin over all classes, as of the start of this round
	next    int              // class; numClasses: the round is over
	pending int              // blocks looked up and not yet used for scoring
	left    int              // blocks to be looked up before the next round
	round   int
	enough  [numClasses]float64 // blocks counted for a class that make it worth to be scored anew
}

// score continues the round, for some blocks looked up.
func (h *Hazard) score(blocks int) {
	s := &h.scorer
	s.left -= blocks
	s.pending = min(s.pending+blocks, maxScores*blocksAScore)
	for ; s.pending >= blocksAScore; s.pending -= blocksAScore {
		if s.next == numClasses && s.left <= 0 {
			h.startRound()
		}
		if c, ok := h.nextToScore(); ok {
			h.scoreClass(c)
		}
	}
}

// nextToScore returns the next class of the round that has enough new counts.
func (h *Hazard) nextToScore() (c int, ok bool) {
	s := &h.scorer
	for last := min(s.next+classesATurn, numClasses); s.next < last; {
		c = s.next
		s.next++
		fresh := float64(h.tables.fresh[c].n)
		if fresh >= s.enough[c] || fresh > 0 && s.round%waitRounds == c%waitRounds {
			return c, true
		}
	}
	return 0, false
}

// startRound finds the chances over all classes.
func (h *Hazard) startRound() {
	s, t := &h.scorer, &h.tables
	s.round++
	s.next, s.left = 0, blocksARound
	var used, risk [numBins]float32
	for c := range numClasses {
		for b := range risk {
			used[b] += t.used[c][b]
			risk[b] += t.risk[c][b]
		}
	}
	prior, believed := float64(max(minFlat, h.entries)), flatHazard
	for b := range risk {
		s.flat[b] = (float64(used[b])/t.weight + believed*prior) / (float64(risk[b])/t.weight + prior)
		believed = min(believed, s.flat[b]) // an age that none has reached is no better than those before it
	}
}

// scoreClass sets the worth of each bin of class c: the greatest expected rate of hits per second
// from keeping an entry for some time (the Gittins index of a stopping problem). Its hazard is the
// flat one scaled by how the class as a whole compares, and approaches the counts as they grow.
func (h *Hazard) scoreClass(c int) {
	t, flat := &h.tables, &h.scorer.flat
	t.settle(c)
	used, risk, expected := 0., 0., 0.
	for b := range flat {
		used += float64(t.used[c][b])
		risk += float64(t.risk[c][b])
		expected += float64(t.risk[c][b]) * flat[b]
	}
	scale := 1 / t.weight
	h.scorer.enough[c] = freshShare * (risk*scale + hazardPrior)
	ratio := (used*scale + ratioPrior*usualRatio(uint16(c))) / (expected*scale + ratioPrior)
	var hazard [numBins]float64
	for b := range flat {
		believed := atMost(flat[b]*ratio, 1) * hazardPrior
		hazard[b] = atMost((float64(t.used[c][b])*scale+believed)/(float64(t.risk[c][b])*scale+hazardPrior), maxHazard)
	}
	index(&hazard, &h.worths[c])
	for _, k := range h.kinds {
		if k == nil {
			continue
		}
		for i := range k.half {
			if half := &k.half[i]; half.filled[c] != 0 {
				half.settle(c, &h.worths[c])
			}
		}
	}
}

// usualRatio returns how the hazard of a class usually compares.
func usualRatio(class uint16) float64 {
	if usesOf(class) == 0 {
		return onceRatio
	}
	return againRatio
}

// atMost does as min without the handling of NaN, which dominates the time of a loop.
func atMost(x, limit float64) float64 {
	if x > limit {
		return limit
	}
	return x
}

// point is a point of the curve of hits over time kept.
type point struct{ time, hits float64 }

// steeper reports whether the slope from a point to b is steeper than to c; both are later.
func steeper(from, b, c point) bool {
	return (b.hits-from.hits)*(c.time-from.time) > (c.hits-from.hits)*(b.time-from.time)
}

// index returns, for each bin, the steepest slope from the middle of the bin to a later edge of the
// curve of expected hits over expected time kept. Only corners of the curve's upper hull can be the
// steepest.
func index(hazard *[numBins]float64, w *worths) {
	var at [numBins + 1]point // edges of bins
	alive := 1.
	for b, chance := range hazard {
		at[b+1] = point{at[b].time + alive*width(b)*(1-chance/2), at[b].hits + alive*chance}
		if alive *= 1 - chance; alive < minReach {
			alive = minReach
		}
	}
	var hull [numBins + 1]point // from the last edge to the nearest
	n := 0
	for b := numBins - 1; b >= 0; b-- {
		end := at[b+1]
		for n >= 2 && !steeper(end, hull[n-1], hull[n-2]) {
			n--
		}
		hull[n] = end
		n++
		middle := point{(at[b].time + end.time) / 2, (at[b].hits + end.hits) / 2}
		best := n - 1
		for best > 0 && steeper(middle, hull[best-1], hull[best]) {
			best--
		}
		w[b] = float32((hull[best].hits - middle.hits) / (hull[best].time - middle.time))
	}
}
