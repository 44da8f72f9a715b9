package main

// aroundKill is how many requests before and behind a kill of the agent are compared.
const aroundKill = 50

// around keeps what is needed to compare the hits before and behind kills of the agent: requests in the order they were
// dealt, which is their number less one.
type around struct {
	requests []blocksOf
	kills    []int // number of the request dealt last
}

type blocksOf struct{ blocks, hits int }

func (a *around) kill(dealt int) { a.kills = append(a.kills, dealt) }

// request notes the hits of a request. One that was computed twice counts as it ended.
func (a *around) request(number, blocks, hits int) {
	for len(a.requests) < number {
		a.requests = append(a.requests, blocksOf{})
	}
	a.requests[number-1] = blocksOf{blocks, hits}
}

// rates are the shares of hits before and behind all kills.
func (a *around) rates() (before, after float64) {
	var b, f blocksOf
	for _, at := range a.kills {
		b.add(a.between(at-aroundKill, at))
		f.add(a.between(at, at+aroundKill))
	}
	return ratio(b.hits, b.blocks), ratio(f.hits, f.blocks)
}

func (a *around) between(from, to int) (sum blocksOf) {
	n := len(a.requests)
	for _, r := range a.requests[min(max(from, 0), n):min(to, n)] {
		sum.add(r)
	}
	return sum
}

func (b *blocksOf) add(o blocksOf) { b.blocks, b.hits = b.blocks+o.blocks, b.hits+o.hits }
