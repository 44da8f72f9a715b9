package evict

import (
	"math"
	"math/bits"
)

// cells are entries of one kind: for each class a list by time of last use, cut into bins of age, and over the classes a
// tournament for the cell that is worth least.
//
//	class c:  newest ── bin 0 ── │ ── bin 1 ── │ ... ── oldest        the list; first[c][b] is the oldest run of bin b
type cells struct {
	newest [numClasses]uint32
	first  [numClasses][numBins]eldest
	filled [numClasses]uint64 // bit per bin that has entries
	due    [numClasses]uint32 // ms: no run of the class changes its bin before
	worst  [numClasses]float32
	low    [numClasses]uint8     // bin of worst
	winner [2 * numClasses]uint8 // tournament: winner[1] is the class whose worst is least
	masked [numClasses]uint64    // bins that this call of Victim passes over
	held   [numClasses]uint32    // entries
}

// eldest is the oldest run of a bin, and the time of its last use, ms: whether it is too old for the bin must not cost a look at it.
type eldest struct{ run, used uint32 }

// worths are the worth of an entry in each bin of a class, in hits per second kept.
type worths [numBins]float32

var inf = float32(math.Inf(1))

func (k *cells) init() {
	for c := range numClasses {
		k.winner[numClasses+c] = uint8(c)
		k.worst[c] = inf
	}
	for i := numClasses - 1; i > 0; i-- {
		k.winner[i] = k.winner[2*i]
	}
}

// settle finds the cell of class c that is worth least anew, and plays its games.
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

// put makes an entry, used now, the newest of class c.
func (k *cells) put(t *nodes, w *[numClasses]worths, e uint32, n *node, c uint8, now uint32) {
	k.join(t, w, e, n, c, 0, now)
}

// join makes an entry the newest of a class, of which it is in the run of the one before it, or in one of its own. An entry that
// was used before may not be in an earlier bin.
func (k *cells) join(t *nodes, w *[numClasses]worths, e uint32, n *node, c, bin uint8, used uint32) {
	n.newer, n.older = 0, k.newest[c]
	k.newest[c] = e
	k.held[c]++
	if n.older != 0 {
		before := t.at(n.older)
		r := t.runOf(before)
		before.newer, bin = e, min(bin, r.bin)
		if r.used == used && r.bin == bin && r.count < maxRun {
			n.run = before.run
			r.count++
			return
		}
		n.run = t.runs.put(e, c, bin, used)
		r.newer = n.run
	} else {
		n.run = t.runs.put(e, c, bin, used)
	}
	if k.filled[c]>>bin&1 == 0 {
		k.fill(w, int(c), int(bin), eldest{n.run, used})
	}
	if due := used + uint32(min(edges[bin+1], never)); k.held[c] == 1 || int32(due-k.due[c]) < 0 {
		k.due[c] = due
	}
}

// take removes an entry.
func (k *cells) take(t *nodes, w *[numClasses]worths, e uint32, n *node) {
	r := t.runOf(n)
	c, b := int(r.class), int(r.bin)
	if n.newer != 0 {
		t.at(n.newer).older = n.older
	} else {
		k.newest[c] = n.older
	}
	var older *node
	if n.older != 0 {
		older = t.at(n.older)
		older.newer = n.newer
	}
	if r.first == e {
		r.first = n.newer
	}
	if r.count--; r.count == 0 {
		if k.first[c][b].run == n.run {
			k.next(t, w, c, b, r.newer)
		}
		if older != nil {
			t.runOf(older).newer = r.newer
		}
		t.runs.remove(n.run)
	}
	k.held[c]--
}

// next makes a run, which follows the oldest of a bin, the oldest, or empties the bin.
func (k *cells) next(t *nodes, w *[numClasses]worths, c, b int, follower uint32) {
	if follower != 0 {
		if r := t.runs.at(follower); int(r.bin) == b {
			k.first[c][b] = eldest{follower, r.used}
			return
		}
	}
	k.first[c][b] = eldest{}
	k.filled[c] &^= 1 << b
	if int(k.low[c]) == b {
		k.settle(c, &w[c])
	}
}

func (k *cells) fill(w *[numClasses]worths, c, b int, e eldest) {
	k.first[c][b] = e
	k.filled[c] |= 1 << b
	if s := w[c][b]; s <= k.worst[c] {
		k.settle(c, &w[c])
	}
}
