package agent

import "github.com/kvagent/kvagent/pool"

// maxPastEpochs is of how many spaces that are gone the last weights epoch is kept. Beyond it all spaces made from then on begin above all of them; an
// engine that lives through that takes its space for one that was reset, which costs it what it has cached itself.
const maxPastEpochs = 4096

// pastEpochs are the last weights epochs of spaces that were reset and are gone, so that none comes back. The registry's mutex guards it.
type pastEpochs struct {
	last  map[pool.Fingerprint]uint32
	floor uint32 // of those that are not in last any more, the highest
}

// add notes that a space is gone in its epoch last.
func (p *pastEpochs) add(fp pool.Fingerprint, last uint32) {
	if len(p.last) >= maxPastEpochs {
		for _, epoch := range p.last {
			p.floor = max(p.floor, epoch)
		}
		p.last = nil
	}
	if p.last == nil {
		p.last = make(map[pool.Fingerprint]uint32)
	}
	p.last[fp] = last
}

// next is the first epoch of a space that is made now.
func (p *pastEpochs) next(fp pool.Fingerprint) uint32 { return max(p.floor, p.last[fp]) + 1 }
