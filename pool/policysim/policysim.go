// Package policysim says how many blocks a cache of a given size would have hit on a trace of requests: exact LRU,
// and Belady's optimum, against which real eviction code is measured. It holds numbers, not bytes.
package policysim

import "container/list"

// Trace is requests, each the blocks of a prompt from its start; equal numbers are equal blocks.
type Trace [][]int

// Blocks is the number of blocks asked for.
func (t Trace) Blocks() (n int) {
	for _, r := range t {
		n += len(r)
	}
	return n
}

// LRU is the number of block hits of a cache that forgets the least recently used block. A request hits the leading
// blocks that are stored, in order; then all its blocks are used, in order, and stored if they are not.
func LRU(t Trace, capacity int) (hits int) {
	if capacity < 1 {
		return 0
	}
	at, recent := map[int]*list.Element{}, list.New()
	for _, request := range t {
		hits += prefix(request, func(b int) bool { return at[b] != nil })
		for _, b := range request {
			if e := at[b]; e != nil {
				recent.MoveToFront(e)
				continue
			}
			if recent.Len() == capacity {
				delete(at, recent.Remove(recent.Back()).(int))
			}
			at[b] = recent.PushFront(b)
		}
	}
	return hits
}

func prefix(request []int, stored func(int) bool) int {
	for i, b := range request {
		if !stored(b) {
			return i
		}
	}
	return len(request)
}
