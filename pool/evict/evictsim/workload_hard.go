package evictsim

// These shapes try to make the policy worse than LRU: repeated blocks stop being repeated, others
// begin to, and at ages at which a pool of a usual size just has them or just lost them. They were
// written against an earlier policy.

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
