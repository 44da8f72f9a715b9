package evictsim

import (
	"slices"
)

// These shapes try to make the policy worse than LRU: repeated blocks stop being repeated, others
// begin to, and at ages at which a pool of a usual size just has them or just lost them. They were
// written after the policy.

// uniform draws documents evenly, so that nothing can be learned.
func uniform(w *writer) {
	docs := w.prompts(w.between(600, 2400), 4, 24)
	w.arrivals(0, hour, 4, func(at float64) { w.add(at, docs[w.rand.IntN(len(docs))]) })
}

// inversion draws documents by popularity; every six minutes the least popular become the most
// popular.
func inversion(w *writer) {
	docs := w.prompts(1500, 4, 24)
	pick := w.zipf(len(docs), 1.1)
	w.arrivals(0, hour, 4, func(at float64) {
		i := pick()
		if int(at/(6*minute))%2 == 1 {
			i = len(docs) - 1 - i
		}
		w.add(at, docs[i])
	})
}

// sliding draws evenly from recent documents, with a new one at a steady rate: LRU has all of a
// window that fits.
func sliding(w *writer) {
	const window = 600 // documents, 8,400 blocks
	var docs [][]uint32
	w.arrivals(0, hour, 4, func(at float64) {
		if len(docs) == 0 || w.rand.IntN(6) == 0 {
			docs = append(docs, w.fresh(w.between(4, 24)))
			w.add(at, docs[len(docs)-1])
			return
		}
		w.add(at, docs[len(docs)-1-w.rand.IntN(min(window, len(docs)))])
	})
}

// twice repeats each document once, after so many blocks of others, among documents that are never
// repeated.
func (w *writer) twice(blocks int) {
	due := [][]uint32{}
	waiting := 0 // blocks in due
	w.arrivals(0, hour, 4, func(at float64) {
		if waiting >= blocks && w.rand.IntN(3) > 0 {
			w.add(at, due[0])
			waiting -= 2 * len(due[0])
			due = due[1:]
			return
		}
		doc := w.fresh(w.between(8, 32))
		w.add(at, doc)
		if w.rand.IntN(2) == 0 {
			due = append(due, doc)
			waiting += 2 * len(doc)
		}
	})
}

// branches has a few very long beginnings from which prompts branch off at any depth; each branch
// is repeated.
func branches(w *writer) {
	trunks := w.prompts(3, 500, 1200)
	w.arrivals(0, hour, 0.15, func(at float64) {
		trunk := trunks[w.rand.IntN(len(trunks))]
		chain := append(slices.Clone(trunk[:1+w.rand.IntN(len(trunk))]), w.fresh(w.between(2, 60))...)
		for range w.between(1, 3) {
			w.add(at, chain)
			at += w.wait(150, 1)
		}
	})
}

// pingpong uses the same documents forwards and backwards.
func pingpong(w *writer) {
	docs := w.prompts(900, 10, 24) // 15,000 blocks
	i, step := 0, 1
	w.arrivals(0, hour, 4, func(at float64) {
		w.add(at, docs[i])
		if i+step < 0 || i+step >= len(docs) {
			step = -step
		}
		i += step
	})
}

// betrayal repeats, for half an hour, for ever what was used twice and never what was used once;
// then the reverse.
func betrayal(w *writer) {
	var loyal, late [][]uint32
	w.arrivals(0, hour, 4, func(at float64) {
		switch {
		case w.rand.IntN(2) == 0:
			doc := w.fresh(w.between(6, 20))
			late = append(late, doc)
			w.add(at, doc)
		case at < hour/2 && (len(loyal) < 400 || w.rand.IntN(20) == 0):
			doc := w.fresh(w.between(6, 20))
			loyal = append(loyal, doc)
			w.add(at, doc)
			w.add(at+20*second, doc)
		case at < hour/2:
			w.add(at, loyal[max(0, len(loyal)-400)+w.rand.IntN(min(400, len(loyal)))])
		default:
			w.add(at, late[len(late)-1-w.rand.IntN(min(400, len(late)))])
		}
	})
}
