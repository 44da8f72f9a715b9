package tier

import (
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/names"
)

// era is a space between two resets. It never changes: another name, epoch or off is another era,
// and what was begun in an earlier one ends without effect.
type era struct {
	stored pool.Fingerprint // its name in the tiers
	epoch  uint32           // in memory; 0 during a reset, and after the space was closed
	off    bool             // the tiers are not used: the space is private, or the epoch is not saved
}

// key returns the key of a shard in the tiers.
func (e *era) key(k *entryKey, shard uint8) pool.Key {
	return pool.Key{Space: e.stored, Group: k.group, Shard: shard, Hash: k.hash}
}

// begin begins an era of a space, from an epoch in memory on; the caller holds spaces.mu.
func (s *space) begin(name names.Name, epoch uint32) {
	next := era{stored: name.Stored, epoch: epoch, off: name.Off}
	if now := s.now.Load(); now == nil || *now != next {
		s.now.Store(&next)
	}
}

// resetting ends the era of a space whose reset has begun. resetMemory begins the next one.
func (p *Pool) resetting(fp pool.Fingerprint) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	if id, open := p.openID(fp); open {
		p.spaces.get(id).now.Store(&era{})
		p.storage.noteAll()
	}
}

// renamed begins another era of a space whose name has changed, or whether its tiers are off.
func (p *Pool) renamed(fp pool.Fingerprint) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	id, open := p.openID(fp)
	if !open {
		return
	}
	if sp := p.spaces.get(id); sp.now.Load().epoch != 0 { // else resetMemory follows
		sp.begin(p.nameOf(sp), p.Memory.Epoch(id))
		p.storage.noteAll()
	}
}

// adopted resets memory after a reset by another node.
func (p *Pool) adopted(fp pool.Fingerprint) {
	if err := p.forgetMemory(fp); err != nil {
		p.o.Log("", "a reset by another node could not be applied to memory", err)
	}
	p.spaces.mu.Lock()
	then := p.spaces.onAdopted
	p.spaces.mu.Unlock()
	if _, open := p.openID(fp); open && then != nil {
		then(fp)
	}
}

// resetMemory starts a new epoch in memory, for a space that has its new name.
func (p *Pool) resetMemory(id pool.SpaceID, sp *space) (uint32, error) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	return p.resetMemoryLocked(id, sp)
}

func (p *Pool) resetMemoryLocked(id pool.SpaceID, sp *space) (uint32, error) {
	p.cancelSpace(id)
	due := p.names.Epoch(sp.spec.Fingerprint)
	epoch, err := p.Memory.ResetSpace(id)
	if err == nil {
		p.names.Forgotten(sp.spec.Fingerprint, due)
	}
	if p.spaces.get(id) == sp {
		sp.begin(p.nameOf(sp), p.Memory.Epoch(id))
		p.storage.noteAll()
	}
	return epoch, err
}

// endReset resets the memory of a space that was closed and opened again during its reset, if that
// ended the era of the second one.
func (p *Pool) endReset(fp pool.Fingerprint) (err error) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	if id, open := p.openID(fp); open {
		if sp := p.spaces.get(id); sp.now.Load().epoch == 0 {
			_, err = p.resetMemoryLocked(id, sp)
		}
	}
	return err
}

// forgetMemory drops what memory has of a space that has its new name in the tiers.
func (p *Pool) forgetMemory(fp pool.Fingerprint) error {
	if id, open := p.openID(fp); open {
		if sp := p.spaces.get(id); sp != nil {
			_, err := p.resetMemory(id, sp)
			return err
		}
	}
	due := p.names.Epoch(fp)
	if err := p.Memory.Forget(fp); err != nil {
		return err
	}
	p.names.Forgotten(fp, due)
	p.renamed(fp) // it may have been opened meanwhile, in an epoch that is over
	return nil
}
