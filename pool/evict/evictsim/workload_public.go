package evictsim

import (
	"slices"
)

// These shapes follow public traces and usual services, by published numbers only: rates, lengths,
// how much is shared and how long people and tools take. They were written after the policy.

// length returns a random number of blocks around mean, at least one; sigma is of its logarithm.
func (w *writer) length(mean, sigma float64) int { return 1 + int(w.wait(mean, sigma)/second) }

// rag has instructions, some passages by popularity in the order they were found, and a question.
func (w *writer) rag(from, to, perSecond float64) {
	shared := w.fresh(2)
	pick := w.zipf(3000, 1.1)
	known := map[[5]int][]uint32{} // blocks of the passage at the end of a way
	w.arrivals(from, to, perSecond, func(at float64) {
		chain, way := slices.Clone(shared), [5]int{}
		for i := range w.between(2, len(way)) {
			way[i] = 1 + pick()
			if known[way] == nil {
				known[way] = w.fresh(1 + way[i]%4)
			}
			chain = append(chain, known[way]...)
		}
		w.add(at, append(chain, w.fresh(1)...))
	})
}

// batch reads the same 600 documents every quarter of an hour, with new instructions after them,
// beside chats.
func batch(w *writer) {
	docs := w.prompts(600, 10, 30)
	for round := range 4 {
		at := float64(round) * 15 * minute
		for _, d := range docs {
			w.add(at, append(slices.Clone(d), w.fresh(1)...))
			at += w.wait(0.8, 0.3)
		}
	}
	w.chats(0, hour, 0.4, 60, 6)
}

// growing has agents whose prompts grow to some hundred blocks; most steps follow at once, some
// wait for a person.
func (w *writer) growing(from, to, perSecond float64) {
	shared := w.prompts(3, 10, 20)
	w.arrivals(from, to, perSecond, func(at float64) {
		chain := slices.Clone(shared[w.rand.IntN(3)])
		for range w.between(10, 60) {
			if at >= to {
				return
			}
			chain = append(chain, w.fresh(w.length(3, 1))...)
			w.add(at, chain)
			if w.rand.IntN(8) == 0 {
				at += w.wait(300, 1)
			} else {
				at += w.wait(4, 0.8)
			}
		}
	})
}
