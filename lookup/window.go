package lookup

// stored holds which blocks of a sliding-window group the index has.
type stored struct {
	group uint8
	run   []uint32 // run[i]: number of consecutive stored or own blocks right before block i
}

// windowsEnd lowers end until every sliding-window group has its window before it. Full-attention
// groups have every shorter prefix too, so they are not queried again. Each group is queried once,
// although windows that disagree lower end many times.
func (p *plan) windowsEnd(end uint64) uint64 {
	var groups []stored
	for i := range p.asked() {
		if g := p.group(i); p.s.Groups[g].Window != 0 && end > 0 {
			groups = append(groups, stored{g, p.runs(g, end)})
		}
	}
	for lowered := true; lowered; {
		lowered = false
		for i := range groups {
			if e := p.windowEnd(&groups[i], end); e < end {
				end, lowered = e, true
			}
		}
	}
	return end
}

// runs queries the index for a group's blocks before end.
func (p *plan) runs(g uint8, end uint64) []uint32 {
	all := p.view(g, 0, end)
	present := make([]bool, all.N)
	p.ix.Exists(p.s.ID, g, all, present)
	for i := range min(p.own()/uint64(p.s.Groups[g].BlockTokens), uint64(all.N)) {
		present[i] = true
	}
	run := make([]uint32, all.N+1)
	for i, ok := range present {
		if ok {
			run[i+1] = run[i] + 1
		}
	}
	return run
}

// windowEnd returns the greatest aligned end' <= end before which the group's window is stored or
// the engine's own.
func (p *plan) windowEnd(s *stored, end uint64) uint64 {
	block, align := uint64(p.s.Groups[s.group].BlockTokens), p.align()
	for ; end > 0; end -= align {
		if uint64(s.run[end/block]) >= p.windowBlocks(s.group, end) {
			return end
		}
	}
	return 0
}

// windowBlocks returns how many blocks before end the next token attends to: those that hold the
// Window-1 tokens before it (as vLLM's SlidingWindowManager counts), or all of them; of a chunk,
// those that hold its tokens before end (as its ChunkedLocalAttentionManager counts).
func (p *plan) windowBlocks(g uint8, end uint64) uint64 {
	block, w := uint64(p.s.Groups[g].BlockTokens), uint64(p.s.Groups[g].Window)
	if w > Chunked {
		return end/block - (end-end%(w-Chunked))/block
	}
	return min((w-1+block-1)/block, end/block)
}
