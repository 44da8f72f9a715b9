package peer

import (
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// pin is blocks that a client reads by one-sided reads. They are pinned until it says UNPIN, or its
// connection ends. A read that goes on after that may find other bytes, which do not match the sum
// that the client has.
type pin struct {
	*answer
	since time.Time
}

// sendPlaces answers a PIN.
func (v *served) sendPlaces(r *request) error {
	m, err := v.pin(r)
	if err != nil {
		return err
	}
	return v.send(kindPlaces, r.id, m.encode())
}

// pin pins the blocks of a PIN, if they can be read and there is room.
func (v *served) pin(r *request) (places, error) {
	reader := v.server.cfg.Reader
	if reader == nil {
		return places{outcome: placedNone}, nil
	}
	at, err := reader.Exposed()
	if err != nil {
		return places{outcome: placedNone}, nil //nolint:nilerr // the blocks come in frames
	}
	a := v.acquire(r)
	v.releaseRefused(a)
	if ok, err := v.keep(r.id, a); !ok {
		v.server.cfg.Slots.Release(a.held, a.status)
		return places{outcome: placedFull}, err
	}
	m := places{protocol: at.Protocol, target: at.Target}
	for _, row := range a.rows {
		m.rows = append(m.rows, placeRow{row: row})
	}
	k := 0
	for i := range m.rows {
		if m.rows[i].status == pool.OK {
			m.rows[i].address = at.Address + uint64(a.slot(k).Off)
			k++
		}
	}
	return m, nil
}

// releaseRefused frees the slots of the blocks that the client may not read.
func (v *served) releaseRefused(a *answer) {
	var refused, held []pool.Slot
	var ends, status []pool.Status
	for i, s := range a.held {
		if _, sent := slices.BinarySearch(a.send, i); sent {
			held, status = append(held, s), append(status, a.status[i])
		} else {
			refused, ends = append(refused, s), append(ends, a.status[i])
		}
	}
	if len(refused) == 0 {
		return
	}
	v.server.cfg.Slots.Release(refused, ends)
	a.held, a.status = held, status
	for k := range a.send {
		a.send[k] = k
	}
}

// maxPins bounds the PINs of one connection that were not freed: one without a block takes memory,
// too.
const maxPins = 1024

// keep registers pinned blocks, if there is room for them.
func (v *served) keep(id uint32, a *answer) (ok bool, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.pins[id] != nil {
		return false, malformed("PIN: id %d is in use", id)
	}
	full := v.pinned+a.bytes > v.server.cfg.Limits.PinnedBytes || len(v.pins) >= maxPins
	if v.closed || len(v.pins) > 0 && full {
		return false, nil
	}
	if v.server.pinned.Add(a.bytes) > int64(len(v.server.cfg.Arena)/pinnedShare) {
		v.server.pinned.Add(-a.bytes)
		return false, nil
	}
	v.pins[id] = &pin{a, time.Now()}
	v.pinned += a.bytes
	return true, nil
}

// pinnedShare is the divisor of the arena that gives what all connections together may pin.
const pinnedShare = 4

// unpin frees what a PIN has pinned.
func (v *served) unpin(id uint32) error {
	v.mu.Lock()
	p := v.pins[id]
	if p == nil {
		v.mu.Unlock()
		return malformed("UNPIN: nothing is pinned under %d", id)
	}
	delete(v.pins, id)
	v.pinned -= p.bytes
	v.mu.Unlock()
	v.free(p)
	v.tally(p.answer, time.Since(p.since))
	v.server.count.add(func(c *ServerStats) { c.Placed += uint64(len(p.send)) })
	return nil
}

func (v *served) free(p *pin) {
	v.server.cfg.Slots.Release(p.held, p.status)
	v.server.pinned.Add(-p.bytes)
}

// unpinAll frees what the client has not: its connection has ended.
func (v *served) unpinAll() {
	v.mu.Lock()
	pins := v.pins
	v.pins, v.pinned = nil, 0
	v.mu.Unlock()
	for _, p := range pins {
		v.free(p)
	}
}
