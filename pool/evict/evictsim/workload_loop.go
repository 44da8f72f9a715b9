package evictsim

import "slices"

// loopBlocks is the size of the loops, for capacities below, just at and just above it.
const loopBlocks = 10_000

// loop requests the same documents again and again, in the same order or shuffled each round; once
// is the share of other requests that are not repeated. blocks is the size of all documents.
func (w *writer) loop(blocks int, once float64, shuffle bool) {
	var docs [][]uint32
	for left := blocks; left > 0; {
		n := min(w.between(10, 40), left)
		docs, left = append(docs, w.fresh(n)), left-n
	}
	next := 0
	w.arrivals(0, hour, 3.5, func(at float64) {
		if w.rand.Float64() < once {
			w.add(at, w.fresh(w.between(10, 40)))
			return
		}
		if next++; next >= len(docs) {
			next = 0
			if shuffle {
				w.rand.Shuffle(len(docs), func(i, j int) { docs[i], docs[j] = docs[j], docs[i] })
			}
		}
		w.add(at, docs[next])
	})
}

// tree makes prompts that are paths from the root of a deep tree to a leaf, popular branches more
// often, with a new leaf now and then.
func tree(w *writer) {
	type branch struct {
		chain []uint32
		kids  []*branch
	}
	root := &branch{chain: w.fresh(4)}
	pick := w.zipf(6, 1.3)
	w.arrivals(0, hour, 4, func(at float64) {
		b := root
		for range w.between(2, 9) {
			i := pick()
			if i >= len(b.kids) {
				i = len(b.kids)
				b.kids = append(b.kids, &branch{chain: slices.Concat(b.chain, w.fresh(w.between(1, 8)))})
			}
			b = b.kids[i]
		}
		w.add(at, b.chain)
	})
}
