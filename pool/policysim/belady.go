package policysim

import (
	"container/heap"
	"math"
)

// Belady is the number of block hits of the cache that knows the future: it forgets the block whose next use is the
// farthest away, and does not store one that is used later than all it has. Uses of one request count as in the
// order of its blocks, so a suffix goes before its prefix.
func Belady(t Trace, capacity int) (hits int) {
	if capacity < 1 {
		return 0
	}
	next := nextUses(t)
	c := clairvoyant{capacity: capacity, use: map[int]int{}}
	at := 0
	for _, request := range t {
		hits += prefix(request, func(b int) bool { _, ok := c.use[b]; return ok })
		for _, b := range request {
			c.see(b, next[at])
			at++
		}
	}
	return hits
}

const never = math.MaxInt

// nextUses is, for each use in the order of the trace, when the block is used next.
func nextUses(t Trace) []int {
	next := make([]int, t.Blocks())
	later := map[int]int{}
	at := len(next)
	for i := len(t) - 1; i >= 0; i-- {
		for j := len(t[i]) - 1; j >= 0; j-- {
			at--
			next[at] = never
			if u, ok := later[t[i][j]]; ok {
				next[at] = u
			}
			later[t[i][j]] = at
		}
	}
	return next
}

type clairvoyant struct {
	capacity int
	use      map[int]int // next use of each stored block
	far      farthest    // stored blocks; an element is void if use says otherwise
}

// see is a use of b, which is used again at next.
func (c *clairvoyant) see(b, next int) {
	_, stored := c.use[b]
	switch {
	case next == never:
		delete(c.use, b)
		return
	case !stored && len(c.use) == c.capacity && !c.makeRoom(next):
		return
	}
	c.use[b] = next
	heap.Push(&c.far, use{b, next})
}

// makeRoom forgets the block that is used last, if that is later than next.
func (c *clairvoyant) makeRoom(next int) bool {
	for {
		top := c.far[0]
		if u, ok := c.use[top.block]; !ok || u != top.next {
			heap.Pop(&c.far)
			continue
		}
		if top.next <= next {
			return false
		}
		heap.Pop(&c.far)
		delete(c.use, top.block)
		return true
	}
}

type use struct{ block, next int }

type farthest []use

func (f farthest) Len() int           { return len(f) }
func (f farthest) Less(i, j int) bool { return f[i].next > f[j].next }
func (f farthest) Swap(i, j int)      { f[i], f[j] = f[j], f[i] }
func (f *farthest) Push(x any)        { *f = append(*f, x.(use)) }
func (f *farthest) Pop() any {
	old := *f
	x := old[len(old)-1]
	*f = old[:len(old)-1]
	return x
}
