package mockengine

import "container/list"

// Fault is what happens to the caches immediately before a request of a simulation.
type Fault struct {
	PoolLost     bool  // the agent died: its pool is empty
	EnginesLost  []int // engines that died: their own caches are empty
	Again        []int // requests that are computed again after that, because their engine died
	AgentDown    bool  // there is no agent for this request: nothing comes from the pool or goes to it
	AgentStopped bool  // nothing comes from the stopped agent's pool; saves arrive when it continues
}

// Simulate returns the share of all prompt blocks that a perfect system of these caches would hit:
// one LRU of engineBlocks for each engine and one LRU pool of poolBlocks (0: no limit) for all of
// them. Request i goes to engine deal(i). It is the oracle of a replay and shares nothing with the
// engine: no time, no tokens, no blocks, only hash ids. A request's blocks count as cached, in its
// engine and in the pool, when it arrives. A hit is a block that continues the prefix from the
// engine's own cache and then, where that ends, from the pool. So a repeated prompt hits whole
// here, while an engine computes its last token, and with that its last block, again. faults are by
// request, and may be nil.
func Simulate(records []Record, engines, engineBlocks, poolBlocks int, deal func(int) int,
	faults map[int]Fault) float64 {
	own := make([]*simLRU, engines)
	for i := range own {
		own[i] = newSimLRU(engineBlocks)
	}
	pool := newSimLRU(poolBlocks)
	hits, total := 0, 0
	for i, rec := range records {
		fault := faults[i]
		for _, lost := range fault.EnginesLost {
			own[lost] = newSimLRU(engineBlocks)
		}
		if fault.PoolLost {
			pool = newSimLRU(poolBlocks)
		}
		for _, k := range fault.Again {
			own[deal(k)].use(records[k].HashIDs)
			if !fault.AgentDown {
				pool.use(records[k].HashIDs)
			}
		}
		cache := own[deal(i)]
		n := 0
		for n < len(rec.HashIDs) && cache.has(rec.HashIDs[n]) {
			n++
		}
		for !fault.AgentDown && !fault.AgentStopped && n < len(rec.HashIDs) && pool.has(rec.HashIDs[n]) {
			n++
		}
		hits += n
		total += len(rec.HashIDs)
		cache.use(rec.HashIDs)
		if !fault.AgentDown {
			pool.use(rec.HashIDs)
		}
	}
	if total == 0 {
		return 0
	}
	return float64(hits) / float64(total)
}

// simLRU is an exact LRU over hash ids.
type simLRU struct {
	capacity int // 0: no limit
	order    *list.List
	at       map[uint64]*list.Element
}

func newSimLRU(capacity int) *simLRU {
	return &simLRU{capacity: capacity, order: list.New(), at: make(map[uint64]*list.Element)}
}

func (l *simLRU) has(id uint64) bool { return l.at[id] != nil }

// use makes a chain the most recent, its first block before its last: a suffix is evicted before
// its prefix.
func (l *simLRU) use(chain []uint64) {
	for i := len(chain) - 1; i >= 0; i-- {
		if e := l.at[chain[i]]; e != nil {
			l.order.MoveToFront(e)
			continue
		}
		l.at[chain[i]] = l.order.PushFront(chain[i])
	}
	for l.capacity > 0 && l.order.Len() > l.capacity {
		e := l.order.Back()
		delete(l.at, e.Value.(uint64))
		l.order.Remove(e)
	}
}
