package delivery

import (
	"time"

	"github.com/kvagent/kvagent/pool"
)

// State is what is known of a transfer.
type State uint8

// The states.
const (
	Unknown  State = iota // never opened, or it has ended
	Open                  // more blocks will be stored for it
	Complete              // nothing more will be stored for it
)

// Transfer is a transfer as it is now.
type Transfer struct {
	State  State
	Tokens uint32 // of the prompt if it is open, stored if it is complete; 0: not known
}

// transfer is one that has not ended. Table.mu guards it.
type transfer struct {
	key    Key
	state  State
	owner  uint64 // session that offered it last
	tokens uint32
	ttl    time.Duration
	ends   time.Time
}

// delivered is the state of a transfer that was delivered while it was open. It is kept until its
// sender completes it, because OFFERED of a name that is not known would open it again.
const delivered = Complete + 1

// Offer opens a transfer, or renews it. It returns false if there are too many.
func (t *Table) Offer(s pool.SpaceID, name []byte, session uint64, tokens uint32, ttl time.Duration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.cfg.Now()
	tr := t.transferLocked(Key{s, string(name)}, now)
	if tr == nil {
		return false
	}
	if tr.state == Complete {
		t.setLocked(tr, Open)
		t.mu.count.Opened++
	}
	// One that was delivered stays so: its sender has not heard of it.
	tr.owner, tr.tokens, tr.ttl, tr.ends = session, tokens, ttl, now.Add(ttl)
	t.wakeLocked(s)
	return true
}

// Offered completes a transfer. One that is not known is opened and completed, unless there are too
// many: then it returns false.
func (t *Table) Offered(s pool.SpaceID, name []byte, session uint64, tokens uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.cfg.Now()
	tr := t.transferLocked(Key{s, string(name)}, now)
	if tr == nil {
		return false
	}
	tr.owner, tr.tokens, tr.ends = session, tokens, now.Add(tr.ttl)
	t.completeLocked(tr)
	return true
}

// Delivered ends a transfer, and its fetch: its receiver has the blocks, or no longer wants them.
func (t *Table) Delivered(s pool.SpaceID, name []byte) {
	if f := t.delivered(s, name); f != nil && t.cfg.Deliver != nil {
		t.cfg.Deliver(f.request.Peer, f.request.Fingerprint, f.key.Name)
	}
}

// delivered returns the transfer's fetch if its agent has not been told yet.
func (t *Table) delivered(s pool.SpaceID, name []byte) *fetch {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := Key{s, string(name)}
	if tr := t.mu.transfers[key]; tr != nil && tr.state != delivered {
		t.mu.count.Delivered++
		if tr.state == Complete {
			t.removeLocked(tr)
		} else {
			t.setLocked(tr, delivered)
		}
	}
	f := t.mu.fetches[key]
	if f == nil || f.delivered {
		return nil
	}
	f.delivered = true
	f.cancel()
	return f
}

// transferLocked returns a transfer, which it opens if it is not known; nil if there are too many.
func (t *Table) transferLocked(key Key, now time.Time) *transfer {
	if tr := t.mu.transfers[key]; tr != nil && !t.expiredLocked(tr, now) {
		return tr
	}
	if len(t.mu.transfers) >= MaxTransfers {
		t.expireLocked(now)
	}
	if len(t.mu.transfers) >= MaxTransfers {
		t.mu.count.Refused++
		return nil
	}
	tr := &transfer{key: key, state: Open, ttl: t.cfg.TTL}
	t.mu.transfers[key] = tr
	t.mu.in[Open]++
	t.mu.count.Opened++
	return tr
}

// completeLocked completes a transfer, or ends it if it was delivered.
func (t *Table) completeLocked(tr *transfer) {
	if tr.state == Complete {
		return
	}
	t.mu.count.Completed++
	if tr.state == delivered {
		t.removeLocked(tr)
	} else {
		t.setLocked(tr, Complete)
	}
}

// expiredLocked ends a transfer that has reached its time.
func (t *Table) expiredLocked(tr *transfer, now time.Time) bool {
	if now.Before(tr.ends) {
		return false
	}
	if tr.state != delivered {
		t.mu.count.Expired++
	}
	t.removeLocked(tr)
	return true
}

func (t *Table) setLocked(tr *transfer, to State) {
	t.mu.in[tr.state]--
	t.mu.in[to]++
	tr.state = to
	t.wakeLocked(tr.key.Space)
}

func (t *Table) removeLocked(tr *transfer) {
	t.setLocked(tr, Unknown)
	delete(t.mu.transfers, tr.key)
}

// State returns what is known of a transfer.
func (t *Table) State(s pool.SpaceID, name []byte) Transfer {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stateLocked(t.mu.transfers[Key{s, string(name)}])
}

func (t *Table) stateLocked(tr *transfer) Transfer {
	switch {
	case tr == nil || t.expiredLocked(tr, t.cfg.Now()):
		return Transfer{}
	case tr.state == delivered:
		return Transfer{Complete, tr.tokens}
	}
	return Transfer{tr.state, tr.tokens}
}

// Awaited reports whether a transfer of a space is open: an engine may wait for its blocks.
func (t *Table) Awaited(s pool.SpaceID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.in[Open] > 0 {
		for key, tr := range t.mu.transfers {
			if key.Space == s && tr.state == Open {
				return true
			}
		}
	}
	return false
}

// Watch returns what is known of a transfer, and a channel that is closed at the next change of any
// transfer of its space, or the next commit there. A change after the state was read closes the
// channel.
func (t *Table) Watch(s pool.SpaceID, name string) (Transfer, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.stateLocked(t.mu.transfers[Key{s, name}])
	changed := t.mu.watched[s]
	if changed == nil {
		changed = make(chan struct{})
		t.mu.watched[s] = changed
		t.watching.Add(1)
	}
	return now, changed
}

// Committed wakes the watchers of a space: blocks of it were stored. It costs one load of a number
// if there are none.
func (t *Table) Committed(s pool.SpaceID) {
	if t.watching.Load() == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.wakeLocked(s)
}

func (t *Table) wakeLocked(s pool.SpaceID) {
	if changed := t.mu.watched[s]; changed != nil {
		delete(t.mu.watched, s)
		t.watching.Add(-1)
		close(changed)
	}
}
