package evictsim

import (
	"math"
	"slices"
)

// These shapes follow public traces and usual services, by published numbers only: rates, lengths,
// how much is shared and how long people and tools take. They were written after the policy.

// length returns a random number of blocks around mean, at least one; sigma is of its logarithm.
func (w *writer) length(mean, sigma float64) int { return 1 + int(w.wait(mean, sigma)/second) }

// toolAgent has long instructions with the tools, shared by many, then a task; some tasks continue.
func toolAgent(w *writer) {
	tools := w.prompts(30, 6, 24)
	pick := w.zipf(len(tools), 1.2)
	w.arrivals(0, hour, 5, func(at float64) {
		chain := append(slices.Clone(tools[pick()]), w.fresh(w.length(4, 1))...)
		for w.add(at, chain); w.rand.IntN(3) == 0 && at < hour; w.add(at, chain) {
			chain = append(chain, w.fresh(w.between(1, 3))...)
			at += w.wait(15, 1)
		}
	})
}

// independent has prompts after one of a few short instructions; a twelfth continues once.
func (w *writer) independent(from, to, perSecond float64) {
	shared := w.prompts(4, 1, 2)
	w.arrivals(from, to, perSecond, func(at float64) {
		chain := append(slices.Clone(shared[w.rand.IntN(4)]), w.fresh(w.length(4, 1.2))...)
		w.add(at, chain)
		if at += w.wait(90, 1.2); w.rand.IntN(12) == 0 && at < to {
			w.add(at, append(chain, w.fresh(w.between(1, 4))...))
		}
	})
}

// bailian has two thirds single calls of programs by popularity of their template, and one third
// chats whose times to think range from seconds to an hour.
func bailian(w *writer) {
	templates := w.prompts(400, 2, 20)
	pick := w.zipf(len(templates), 1.3)
	w.arrivals(0, 2*hour, 1.2, func(at float64) {
		w.add(at, append(slices.Clone(templates[pick()]), w.fresh(w.length(3, 1))...))
	})
	w.arrivals(0, 2*hour, 0.25, func(at float64) {
		chain := w.fresh(w.length(5, 1))
		for turns := 1 + w.rand.IntN(12); turns > 0 && at < 2*hour; turns-- {
			w.add(at, chain)
			chain = append(chain, w.fresh(w.length(2, 0.8))...)
			at += w.wait(200, 1.5)
		}
	})
}

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

// shifts has passages, then chats, then agents, then prompts that share nothing, and passages
// again, of different lengths.
func shifts(w *writer) {
	from := 0.
	for i, minutes := range []float64{11, 17, 9, 13, 10} {
		to := from + minutes*minute*(0.7+0.6*w.rand.Float64())
		switch i % 4 {
		case 0:
			w.rag(from, to, 3)
		case 1:
			w.chats(from, to, 1.2, 80, 6)
		case 2:
			w.growing(from, to, 0.08)
		case 3:
			w.independent(from, to, 5)
		}
		from = to
	}
}

// retries repeats many prompts unchanged after some seconds, a few times, and then never.
func retries(w *writer) {
	w.arrivals(0, hour, 3, func(at float64) {
		chain := w.fresh(w.length(10, 0.8))
		for w.add(at, chain); w.rand.IntN(5) < 2; w.add(at, chain) {
			at += w.wait(12, 0.7)
		}
	})
}

// fewLong has a few people with prompts of a thousand blocks each, in turn.
func fewLong(w *writer) {
	for range 6 {
		chain := w.fresh(w.between(300, 1500))
		for at := w.wait(120, 1); at < 2*hour; at += w.wait(240, math.Log(3)) {
			w.add(at, chain)
			if chain = append(slices.Clip(chain), w.fresh(w.between(2, 40))...); w.rand.IntN(12) == 0 {
				chain = w.fresh(w.between(300, 1500))
			}
		}
	}
}
