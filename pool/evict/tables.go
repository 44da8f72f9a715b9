package evict

import "math/bits"

// tables count, per class and bin of age, the blocks that entered the bin and those used in it. A
// block counts as at risk when it enters, not when it is used again or evicted, because blocks
// still stored are observations too (Kaplan and Meier). Counts fade: newer ones weigh more, and all
// are scaled back from time to time.
type tables struct {
	risk, used [numClasses][numBins]float32 // but for what is in fresh
	fresh      [numClasses]counts
	weight     float64 // of a count made now
}

// counts are the counts of a class since they were last added to the tables, which is before each
// use of the tables for the class.
type counts struct {
	come [numBins + 1]int32 // blocks that came into a bin, less those that came into the one before: see enter
	used [numBins]int32
	n    int32 // blocks that came or passed
}

const (
	fading    = 1 / 0.9999 // growth of the weight per look-up
	maxWeight = 1e6
)

// enter counts n blocks of class c that passed from bin from into bin to and all bins between; from
// is -1 for new blocks. This takes two additions for any number of bins:
//
//	bin         0  1  2  3  4  5  6
//	from 1 to 4       +n       -n      come
//	                  n  n  n  0  0    its running sum
func (t *tables) enter(c uint16, from, to int, n int32) {
	fresh := &t.fresh[c]
	fresh.come[from+1] += n
	fresh.come[to+1] -= n
	fresh.n += n
}

func (t *tables) use(c uint16, b int) { t.fresh[c].used[b]++ }

// chance returns the chance that a block of class c is used in bin b. It is what was believed
// before as long as the counts are fewer than prior.
func (t *tables) chance(c, b int, believed, prior float64) float64 {
	return (float64(t.used[c][b])/t.weight + believed*prior) / (float64(t.risk[c][b])/t.weight + prior)
}

// settle adds the counts of a class to the tables, with the current weight: they are never older
// than a round of scores.
func (t *tables) settle(c int) {
	fresh, in := &t.fresh[c], int32(0)
	for b := range numBins {
		in += fresh.come[b]
		t.risk[c][b] += float32(float64(in) * t.weight)
		t.used[c][b] += float32(float64(fresh.used[b]) * t.weight)
	}
	*fresh = counts{}
}

func (t *tables) settleAll() {
	for c := range t.fresh {
		t.settle(c)
	}
}

// fade lets all counts so far weigh less by one look-up.
func (t *tables) fade() {
	if t.weight *= fading; t.weight > maxWeight {
		t.settleAll()
		t.scale()
	}
}

// scale lets a count made now weigh 1.
func (t *tables) scale() {
	for c := range t.risk {
		for b := range t.risk[c] {
			t.risk[c][b] /= float32(t.weight)
			t.used[c][b] /= float32(t.weight)
		}
	}
	t.weight = 1
}

const (
	numBins       = 39 // of age, at most 64; the last begins at 14 hours
	binsPerOctave = 3
	firstShift    = 13 // bins are even in the logarithm of 1<<firstShift ms + age
	fineShift     = 5  // edges are multiples of this part of an octave
)

// thirds is the bin within an octave, by its 32nds: 2^(1/3) is about 41/32 and 2^(2/3) about 51/32.
var thirds = func() (t [1 << fineShift]uint8) {
	for i := 9; i < 19; i++ {
		t[i] = 1
	}
	for i := 19; i < len(t); i++ {
		t[i] = 2
	}
	return t
}()

// binOf returns the bin of an age in ms.
func binOf(age uint32) int {
	at := uint64(age) + 1<<firstShift
	octave := bits.Len64(at) - 1 - firstShift
	fine := at >> (octave + firstShift - fineShift) & (1<<fineShift - 1)
	return min(octave*binsPerOctave+int(thirds[fine]), numBins-1)
}

// edges[i] is the age in ms at which bin i begins; the last edge ends the last bin.
var edges = func() (e [numBins + 1]int64) {
	for i := range e {
		fine := [binsPerOctave]int64{32, 41, 51}[i%binsPerOctave]
		e[i] = fine<<(i/binsPerOctave+firstShift-fineShift) - 1<<firstShift
	}
	return e
}()

// widths are those of the bins, in seconds.
var widths = func() (w [numBins]float64) {
	for b := range w {
		w[b] = float64(edges[b+1]-edges[b]) / 1000
	}
	return w
}()
