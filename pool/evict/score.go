package evict

import (
	"math"
	"slices"
)

// Strength of the prior. A cluster is as many blocks as the prompt of the mean block has: the
// blocks of a prompt are used together, so they tell little more than one.
const (
	flatHazard   = 0.05 // chance of a use in a bin: the same in each, so that the older is worth less, as in LRU
	minFlat      = 100  // blocks that it counts for; or as many as the pool holds, ...
	usualCluster = 50   // ... for prompts of so many blocks, and more or less for others
	ratioPrior   = 6    // clusters
	hazardPrior  = 40   // clusters
	maxHazard    = 0.999
	telling      = 3  // times as often
	heeded       = 16 // one chain in so many has its wish, whether wishes tell anything or not
)

// Pace of scoring.
const (
	blocksARound = 2048 // blocks looked up in a round, at least
	blocksAScore = 12   // blocks looked up between the score of one class and of the next
	maxScores    = 4    // classes scored at one look-up
	classesATurn = 200  // classes examined to find one to score
	freshShare   = 0.02 // of the blocks that a class is judged by: fewer new ones can wait ...
	waitRounds   = 8    // ... for so many rounds at most
	meanLooks    = 1024 // look-ups over which rates are averaged
)

// worths are the worth of an entry in each bin of a class: the chance that it is used again soon.
type worths [numBins]float32

// scorer converts counts to worths, one class at a time, so that no look-up waits for all of them.
type scorer struct {
	flat    [numBins]float64 // chance of a use in a bin over all classes, as of the start of this round
	usual   [families]float64
	keep    [numBins]float64 // what a use a quarter of a bin later is worth of one now
	next    int              // class; numClasses: the round is over
	pending int              // blocks looked up and not yet used for scoring
	left    int              // blocks to be looked up before the next round
	round   int
	enough  [numClasses]float64 // blocks counted for a class that make it worth to be scored anew

	// Sums over about the last meanLooks look-ups: blocks, their squares, and ms.
	blocks, squares, time float64
	last                  uint32 // ms, of the last look-up
}

// note records a look-up.
func (s *scorer) note(blocks int, now uint32) {
	n := float64(blocks)
	s.blocks += n - s.blocks/meanLooks
	s.squares += n*n - s.squares/meanLooks
	s.time += float64(now-s.last) - s.time/meanLooks
	s.last = now
}

// cluster returns how many blocks the prompt of the mean block has.
func (s *scorer) cluster() float64 {
	if s.blocks == 0 {
		return usualCluster
	}
	return max(usualCluster/5, s.squares/s.blocks)
}

// Families of classes whose hazard usually compares alike with the flat one: of so many uses, of so
// many uses and an ended request, of a priority.
const (
	families    = 2*familyEnded + priorities
	familyEnded = maxUses + 1
)

func familyOf(c int) int {
	switch {
	case c >= firstWished:
		return 2*familyEnded + (c-firstWished)/gaps/2
	case c >= firstEnded:
		return familyEnded + (c-firstEnded)/gaps/distances%familyEnded
	}
	return c / (gaps * 2 * distances)
}

// fewer returns the class of blocks that were used once less often; c if there is none.
func fewer(c int) int {
	switch f := familyOf(c); {
	case f >= 2*familyEnded:
		return c - (c-firstWished)/gaps%2*gaps
	case f%familyEnded == 0:
		return c
	case f > familyEnded:
		return c - distances*gaps
	}
	return c - distances*2*gaps
}

// startRatio is how the hazard of each family compares before anything was counted.
var startRatio = [families]float64{0.5, 4, 4, 4, 0.5, 4, 4, 4, 0.1, 0.5, 2, 6}

// wishesTell reports whether wishes of one priority are met more often than those of another.
func (s *scorer) wishesTell() bool {
	wished := s.usual[2*familyEnded:]
	return slices.Max(wished) > telling*slices.Min(wished)
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

// startRound finds the chances over all classes, how the families compare with them, and what a use
// later is worth: less by a factor of e for each time in which as many blocks are looked up as the
// pool holds.
func (h *Hazard) startRound() {
	s, t := &h.scorer, &h.tables
	s.round++
	s.next, s.left = 0, blocksARound
	var used, risk [numBins]float64
	for c := range numClasses {
		for b := range risk {
			used[b] += float64(t.used[c][b])
			risk[b] += float64(t.risk[c][b])
		}
	}
	cluster := s.cluster()
	prior, believed := float64(max(minFlat, h.entries))*cluster/usualCluster, flatHazard
	for b := range risk {
		s.flat[b] = (used[b]/t.weight + believed*prior) / (risk[b]/t.weight + prior)
		believed = min(believed, s.flat[b]) // an age that none has reached is no better than those before it
	}
	var uses, expected [families]float64
	for c := range numClasses {
		u, e := h.observed(c)
		uses[familyOf(c)] += u
		expected[familyOf(c)] += e
	}
	for f := range s.usual {
		few := ratioPrior * cluster
		s.usual[f] = (uses[f] + few*startRatio[f]) / (expected[f] + few)
	}
	horizon := max(1, float64(h.entries)*s.time/1000/max(1, s.blocks))
	for b := range s.keep {
		s.keep[b] = math.Exp(-widths[b] / 4 / horizon)
	}
}

// observed returns the uses of blocks of a class, and how many were to be expected by the flat
// chances.
func (h *Hazard) observed(c int) (used, expected float64) {
	t := &h.tables
	for b, flat := range h.scorer.flat {
		used += float64(t.used[c][b])
		expected += float64(t.risk[c][b]) * flat
	}
	return used / t.weight, expected / t.weight
}

// scoreClass sets the worth of each bin of class c. Its hazard is the flat one scaled by how the
// class as a whole compares, then that of blocks with a use fewer, and approaches the counts as
// they grow. The worth at the middle of a bin is the expected worth of the next use then.
func (h *Hazard) scoreClass(c int) {
	t, s := &h.tables, &h.scorer
	t.settle(c)
	used, expected := h.observed(c)
	cluster, counted, less := s.cluster(), 0., fewer(c)
	ratio := (used + ratioPrior*cluster*s.usual[familyOf(c)]) / (expected + ratioPrior*cluster)
	next := 0. // worth at the end of the bin
	for b := numBins - 1; b >= 0; b-- {
		counted += float64(t.risk[c][b]) / t.weight
		chance := atMost(s.flat[b]*ratio, 1)
		if less != c {
			chance = t.chance(less, b, chance, hazardPrior*cluster)
		}
		chance = atMost(t.chance(c, b, chance, hazardPrior*cluster), maxHazard)
		keep := s.keep[b]
		h.worths[c][b] = rounded(float32(chance/2*keep + (1-chance/2)*keep*keep*next))
		next = keep * keep * (chance + (1-chance)*keep*keep*next)
	}
	s.enough[c] = freshShare * (counted + hazardPrior*cluster)
	for _, k := range h.kinds {
		if k != nil && k.lists[c].oldest != 0 {
			h.settle(k, uint16(c))
		}
	}
}

// rounded returns a worth in steps of a quarter of an octave. Of what is worth about the same, the
// block used least recently goes first, as in LRU: finer differences are mostly noise.
func rounded(worth float32) float32 {
	octave, i := math.Float32frombits(math.Float32bits(worth)&^(1<<23-1)), 0
	for x := worth / octave; i < 4 && x*x > quarters[i]*quarters[i+1]; i++ {
	}
	return octave * quarters[i]
}

var quarters = [...]float32{1, 1.1892071, 1.4142135, 1.6817929, 2} // powers of two

// atMost does as min without the handling of NaN, which dominates the time of a loop.
func atMost(x, limit float64) float64 {
	if x > limit {
		return limit
	}
	return x
}
