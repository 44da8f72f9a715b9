package lookup

// windowsEnd lowers end until every sliding-window group has its window in front of it. Full-attention groups
// have every shorter prefix too, so they need not be asked again.
func (p *plan) windowsEnd(end uint64) uint64 {
	for lowered := true; lowered; {
		lowered = false
		for i := range p.asked() {
			g := p.group(i)
			if p.s.Groups[g].Window == 0 {
				continue
			}
			if e := p.windowEnd(g, end); e < end {
				end, lowered = e, true
			}
		}
	}
	return end
}

// windowEnd is the greatest aligned end' <= end in front of which the group's window is stored or the engine's own.
func (p *plan) windowEnd(g uint8, end uint64) uint64 {
	block, align := uint64(p.s.Groups[g].BlockTokens), p.align()
	if end == 0 {
		return 0
	}
	all := p.view(g, 0, end)
	present := make([]bool, all.N)
	p.ix.Exists(p.s.ID, g, all, present)
	for i := range min(p.own()/block, uint64(all.N)) {
		present[i] = true
	}
	run := make([]uint64, all.N+1) // run[i]: stored blocks that end right before block i
	for i, ok := range present {
		if ok {
			run[i+1] = run[i] + 1
		}
	}
	for ; end > 0; end -= align {
		if run[end/block] >= p.windowBlocks(g, end) {
			return end
		}
	}
	return 0
}

// windowBlocks is how many blocks in front of end the next token attends to: those that hold the Window-1 tokens
// before it (as vLLM's SlidingWindowManager counts), or all there are.
func (p *plan) windowBlocks(g uint8, end uint64) uint64 {
	block, w := uint64(p.s.Groups[g].BlockTokens), uint64(p.s.Groups[g].Window)
	return min((w-1+block-1)/block, end/block)
}
