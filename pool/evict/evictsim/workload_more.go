package evictsim

import (
	"math"
	"slices"
)

// documents draws whole prompts by popularity, whose skew follows from the seed.
func documents(w *writer) {
	docs := w.prompts(w.between(500, 3000), 4, 40)
	pick := w.zipf(len(docs), 1.02+0.5*w.rand.Float64())
	w.arrivals(
		0, hour, 3, func(at float64) { w.add(at, append(slices.Clone(docs[pick()]), w.fresh(w.between(0, 2))...)) },
	)
}

// thinks has chats of people who answer at once, who read, and who go for lunch.
func thinks(w *writer) {
	w.chats(0, 2*hour, 0.2, 8, 8)
	w.chats(0, 2*hour, 0.2, 90, 6)
	w.chats(0, 2*hour, 0.2, 1500, 4)
}

// days has a daily rhythm of chats over three days, with a batch of scans at night.
func days(w *writer) {
	for day := range 3 {
		from := float64(day) * 24 * hour
		for h := range 24 {
			busy := max(0.002, 0.07*math.Sin(float64(h-6)/24*2*math.Pi))
			at := from + float64(h)*hour
			w.chats(at, at+hour, busy, 120, 6)
		}
		w.scans(from+hour, from+3*hour, 0.05)
	}
}

// flood has half an hour of chats, then the same chats beside a flood of prompts that are not
// repeated.
func flood(w *writer) {
	w.chats(0, hour, 0.6, 60, 6)
	w.arrivals(20*minute, 40*minute, 8, func(at float64) { w.add(at, w.fresh(w.between(5, 30))) })
}

// tiny draws prompts of one or two blocks by popularity.
func tiny(w *writer) {
	docs := w.prompts(40_000, 1, 2)
	pick := w.zipf(len(docs), 1.05)
	w.arrivals(0, hour, 40, func(at float64) { w.add(at, docs[pick()]) })
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

// fans has agents that start several others at once, each with the whole conversation so far.
func fans(w *writer) {
	shared := w.prompts(3, 20, 40)
	w.arrivals(0, hour, 0.03, func(at float64) {
		chain := append(slices.Clone(shared[w.rand.IntN(len(shared))]), w.fresh(w.between(4, 12))...)
		for range w.between(2, 10) {
			for range w.between(2, 8) {
				sub, when := slices.Clone(chain), at
				for range w.between(2, 8) {
					sub = append(sub, w.fresh(w.between(1, 4))...)
					w.add(when, sub)
					when += w.wait(5, 0.7)
				}
			}
			chain = append(chain, w.fresh(w.between(2, 6))...)
			at += w.wait(60, 0.5)
		}
	})
}

// few makes some hundred requests in all, like those of a pool that has just been started.
func few(w *writer) {
	w.chats(0, 6*minute, 0.4, 30, 6)
	w.arrivals(0, 6*minute, 0.3, func(at float64) { w.add(at, w.fresh(w.between(10, 60))) })
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
