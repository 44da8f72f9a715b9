package evictsim

import "slices"

// documents draws whole prompts by popularity, whose skew follows from the seed.
func documents(w *writer) {
	docs := w.prompts(w.between(500, 3000), 4, 40)
	pick := w.zipf(len(docs), 1.02+0.5*w.rand.Float64())
	w.arrivals(
		0, hour, 3, func(at float64) { w.add(at, append(slices.Clone(docs[pick()]), w.fresh(w.between(0, 2))...)) },
	)
}

// huge has a few prompts of 400 to 3,000 blocks, each repeated some times.
func huge(w *writer) {
	w.arrivals(0, 2*hour, 0.01, func(at float64) {
		doc := w.fresh(w.between(400, 3000))
		for range w.between(1, 6) {
			w.add(at, append(slices.Clone(doc), w.fresh(w.between(1, 4))...))
			at += w.wait(90, 1)
		}
	})
}

// retimed changes the times of another workload's requests, in their order.
func retimed(make func(*writer), when func(i int, at int64) int64) func(*writer) {
	return func(w *writer) {
		make(w)
		w.sort()
		for i := range w.stream.Requests {
			r := &w.stream.Requests[i]
			r.Millis = when(i, r.Millis)
		}
	}
}

// atOnce puts all at one time.
func atOnce(int, int64) int64 { return 5 }

// bursts puts 200 requests at one time, then nothing for a minute.
func bursts(i int, _ int64) int64 { return int64(i/200) * minute }

// gaps pauses for forty days after every 500 requests.
func gaps(i int, at int64) int64 { return at + int64(i/500)*40*24*hour }

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
