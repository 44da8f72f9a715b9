package evictsim

import (
	"math"
	"math/rand/v2"
	"slices"
)

// Workload is a generator of streams: equal seeds give equal streams.
type Workload struct {
	Name string
	make func(*writer)
}

// Workloads are the generated workloads. Each stream has some 100,000 to 400,000 blocks over half
// an hour to two hours.
var Workloads = []Workload{
	{"sysprompt", sysprompt},
	{"chat", func(w *writer) { w.chats(0, hour, 1, 60, 6) }},
	{"agent", func(w *writer) { w.agents(0, hour, 0.12) }},
	{"scan", func(w *writer) { w.chats(0, hour, 0.5, 60, 6); w.scans(0, hour, 0.3) }},
	{"lru", lruFriendly},
	{"flip", flip},
	{"random", randomPhases},
	{"loop", func(w *writer) { w.loop(loopBlocks, 0, false) }},
	{"loopscan", func(w *writer) { w.loop(loopBlocks*98/100, 0.2, false) }},
	{"loopshuf", func(w *writer) { w.loop(loopBlocks, 0.1, true) }},
	{"documents", documents},
	{"huge", huge},
	{"tree", tree},
	{"chatatonce", retimed(func(w *writer) { w.chats(0, hour, 1, 60, 6) }, atOnce)},
	{"chatbursts", retimed(func(w *writer) { w.chats(0, hour, 1, 60, 6) }, bursts)},
	{"chatgaps", retimed(func(w *writer) { w.chats(0, hour, 1, 60, 6) }, gaps)},
	{"rag", func(w *writer) { w.rag(0, hour, 3) }},
	{"inversion", inversion},
	{"sliding", sliding},
	{"twice", func(w *writer) { w.twice(3000 * 9 / 10) }},
	{"pingpong", pingpong},
}

// Make generates the stream of a seed.
func (w Workload) Make(seed uint64) *Stream {
	out := &writer{rand: rand.New(rand.NewPCG(seed, 7)), stream: &Stream{Name: w.Name}}
	w.make(out)
	out.sort()
	return out.stream
}

const (
	second = 1000 // ms
	minute = 60 * second
	hour   = 60 * minute
)

// writer collects requests, in any order of time.
type writer struct {
	rand   *rand.Rand
	stream *Stream
}

// sort orders the requests by time, and lays out their blocks in that order, so that reading them
// costs no more than in a trace.
func (w *writer) sort() {
	requests := w.stream.Requests
	slices.SortStableFunc(requests, func(a, b Request) int { return int(a.Millis - b.Millis) })
	all := make([]uint32, 0, w.stream.Looked())
	for i := range requests {
		from := len(all)
		all = append(all, requests[i].Blocks...)
		requests[i].Blocks = all[from:len(all):len(all)]
	}
}

func (w *writer) fresh(n int) []uint32 {
	b := make([]uint32, n)
	for i := range b {
		b[i] = uint32(w.stream.Blocks)
		w.stream.Blocks++
	}
	return b
}

func (w *writer) add(at float64, blocks []uint32) {
	w.stream.Requests = append(w.stream.Requests, Request{Millis: int64(at), Blocks: slices.Clone(blocks)})
}

// wait returns a random time around mean seconds, in ms; sigma is of its logarithm.
func (w *writer) wait(mean, sigma float64) float64 {
	return second * mean * math.Exp(sigma*w.rand.NormFloat64()-sigma*sigma/2)
}

func (w *writer) arrivals(from, to, perSecond float64, f func(at float64)) {
	for at := from; ; {
		if at += second * w.rand.ExpFloat64() / perSecond; at >= to {
			return
		}
		f(at)
	}
}

func (w *writer) between(low, high int) int { return low + w.rand.IntN(high-low+1) }

// zipf returns a draw of n things by popularity, the first most often.
func (w *writer) zipf(n int, s float64) func() int {
	z := rand.NewZipf(w.rand, s, 1, uint64(n-1))
	return func() int { return int(z.Uint64()) }
}

func (w *writer) prompts(n, low, high int) [][]uint32 {
	p := make([][]uint32, n)
	for i := range p {
		p[i] = w.fresh(w.between(low, high))
	}
	return p
}

// sysprompt makes prompts that start with one of 200 shared texts and end with a new one.
func sysprompt(w *writer) {
	shared := w.prompts(200, 8, 60)
	pick := w.zipf(len(shared), 1.1)
	w.arrivals(0, hour, 2, func(at float64) {
		w.add(at, append(slices.Clone(shared[pick()]), w.fresh(w.between(1, 20))...))
	})
}

// chats makes conversations that grow turn by turn, with some time to think.
func (w *writer) chats(from, to, perSecond, think, turns float64) {
	shared := w.prompts(8, 1, 6)
	pick := w.zipf(len(shared), 1.2)
	w.arrivals(from, to, perSecond, func(at float64) {
		chain := append(slices.Clone(shared[pick()]), w.fresh(w.between(1, 12))...)
		for ; at < to; at += w.wait(think, 0.8) {
			w.add(at, chain)
			if w.rand.Float64() < 1/turns {
				return
			}
			chain = append(chain, w.fresh(w.between(1, 5))...)
		}
	})
}

// agents makes callers of tools: many short steps, each prompt extending the one before it.
func (w *writer) agents(from, to, perSecond float64) {
	shared := w.prompts(5, 10, 30)
	w.arrivals(from, to, perSecond, func(at float64) {
		chain := append(slices.Clone(shared[w.rand.IntN(len(shared))]), w.fresh(w.between(2, 10))...)
		for range w.between(5, 40) {
			if at >= to {
				return
			}
			w.add(at, chain)
			chain = append(chain, w.fresh(w.between(1, 3))...)
			at += w.wait(6, 1)
		}
	})
}

// scans makes long documents that are read once.
func (w *writer) scans(from, to, perSecond float64) {
	w.arrivals(from, to, perSecond, func(at float64) { w.add(at, w.fresh(w.between(60, 200))) })
}

// lruFriendly uses blocks again with a probability that falls with their age.
func lruFriendly(w *writer) {
	var stack [][]uint32
	back := w.zipf(20000, 1.3)
	w.arrivals(0, hour, 4, func(at float64) {
		i := len(stack) - back()
		var chain []uint32
		if i < 0 || i >= len(stack) {
			chain = w.fresh(w.between(4, 24))
		} else {
			chain = stack[i]
			stack = slices.Delete(stack, i, i+1)
			if w.rand.IntN(3) == 0 {
				chain = append(slices.Clip(chain), w.fresh(1)...)
			}
		}
		stack = append(stack, chain)
		w.add(at, chain)
	})
}

// flip has two sorts of prompts that look the same; in turn only the old or only the new ones are
// repeated.
func flip(w *writer) { w.flips(0, hour, 4*minute, 400) }

func (w *writer) flips(from, to, every float64, far int) {
	var seen [][]uint32
	w.arrivals(from, to, 4, func(at float64) {
		chain := w.fresh(w.between(8, 20))
		if n := len(seen); n > 0 && w.rand.IntN(2) == 0 {
			back := 1 + w.rand.IntN(30)
			if int((at-from)/every)%2 == 0 {
				back = far + w.rand.IntN(far)
			}
			if back <= n {
				chain = seen[n-back]
			}
		}
		seen = append(seen, chain)
		w.add(at, chain)
	})
}

// randomPhases has phases of random kind and strength.
func randomPhases(w *writer) {
	for from := 0.; from < hour; {
		to := from + minute*float64(w.between(3, 15))
		strength := 0.3 + 1.5*w.rand.Float64()
		switch w.rand.IntN(4) {
		case 0:
			w.chats(from, to, strength, 10+200*w.rand.Float64(), 3+8*w.rand.Float64())
		case 1:
			w.agents(from, to, strength/8)
		case 2:
			w.flips(from, to, minute+4*minute*w.rand.Float64(), w.between(50, 1000))
		case 3:
			w.scans(from, to, strength/4)
			w.chats(from, to, strength/2, 30, 5)
		}
		from = to
	}
}
