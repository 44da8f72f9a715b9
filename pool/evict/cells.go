package evict

import (
	"math"
	"math/bits"
)

// cells are entries of one kind, young or old: for each class the list of its runs by last use, cut
// into bins of age, and over the classes a tournament for the cell with the least worth.
//
//	class c:  newest ── bin 0 ── │ ── bin 1 ── │ ... ── oldest      the list of runs
//	first[c][b]: the oldest run of bin b
type cells struct {
	first  [numClasses][numBins]eldest
	filled [numClasses]uint64 // bit per bin that has entries
	worst  [numClasses]float32
	low    [numClasses]uint8              // bin of worst
	winner [2 * numClasses]uint16         // tournament: winner[1] is the class whose worst is least
	masked [numClasses]uint64             // bins that this call of Victim passes over
	held   [numClasses]uint32             // entries
	full   [(numClasses + 63) / 64]uint64 // bit per class that has entries
}

// eldest is the oldest run of a bin, and the time of its last use, ms, which is copied here so that
// checking its age does not load the run.
type eldest struct{ run, used uint32 }

// worths are the worth of an entry in each bin of a class, in hits per second of keeping it.
type worths [numBins]float32

var inf = float32(math.Inf(1))

func (k *cells) init() {
	for c := range numClasses {
		k.winner[numClasses+c] = uint16(c)
		k.worst[c] = inf
	}
	for i := numClasses - 1; i > 0; i-- {
		k.winner[i] = k.winner[2*i]
	}
}

// settle finds the cell of class c with the least worth again, and replays its games of the
// tournament.
func (k *cells) settle(c int, w *worths) {
	worst, low := inf, uint8(0)
	for m := k.filled[c] &^ k.masked[c]; m != 0; m &= m - 1 {
		b := bits.TrailingZeros64(m)
		if s := w[b]; s <= worst {
			worst, low = s, uint8(b)
		}
	}
	if worst == k.worst[c] && low == k.low[c] {
		return
	}
	k.worst[c], k.low[c] = worst, low
	for i := (numClasses + c) / 2; i > 0; i /= 2 {
		a, b := k.winner[2*i], k.winner[2*i+1]
		if k.worst[b] < k.worst[a] || k.worst[b] == k.worst[a] && k.low[b] > k.low[a] {
			a = b
		}
		k.winner[i] = a
	}
}

// keep adds more to the number of entries of a class.
func (k *cells) keep(c int, more int32) {
	k.held[c] += uint32(more)
	if k.held[c] == 0 {
		k.full[c/64] &^= 1 << (c % 64)
	} else {
		k.full[c/64] |= 1 << (c % 64)
	}
}

// append makes a run the newest of its class.
func (k *cells) append(w *[numClasses]worths, id uint32, r *run) {
	if k.filled[r.class]>>r.bin&1 == 0 {
		k.begin(w, id, r)
	}
}

// begin makes a run the oldest of its bin.
func (k *cells) begin(w *[numClasses]worths, id uint32, r *run) {
	c, b := int(r.class), int(r.bin)
	k.first[c][b] = eldest{id, r.used}
	if k.filled[c]>>b&1 == 0 {
		k.filled[c] |= 1 << b
		if s := w[c][b]; s <= k.worst[c] {
			k.settle(c, &w[c])
		}
	}
}

// leave replaces a run that leaves its bin by the next one, if it is the oldest.
func (k *cells) leave(t *runs, w *[numClasses]worths, id uint32, r *run) {
	c, b := int(r.class), int(r.bin)
	if k.first[c][b].run != id {
		return
	}
	if r.newer != 0 {
		if next := t.at(r.newer); next.bin == r.bin && next.half == r.half {
			k.first[c][b] = eldest{r.newer, next.used}
			return
		}
	}
	k.first[c][b] = eldest{}
	k.filled[c] &^= 1 << b
	if int(k.low[c]) == b {
		k.settle(c, &w[c])
	}
}
