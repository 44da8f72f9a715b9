package disk

import (
	"sync"
	"sync/atomic"

	"github.com/kvagent/kvagent/pool"
)

// maxNotes bounds the keys that wait to be taken: 52 bytes each, in two lists.
const maxNotes = 1 << 14

// notes are the keys that came or went. Its lock is the last of all.
type notes struct {
	on atomic.Bool // false: nothing is noted

	mu     sync.Mutex
	list   []pool.Key
	lost   bool
	signal func()
}

// note notes a key that has come or gone. It is called after the index has changed, so that a
// caller who takes the note finds the change.
func (n *notes) note(k *pool.Key) {
	if !n.on.Load() {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.list) == maxNotes {
		n.lost = true
	} else {
		n.list = append(n.list, *k)
	}
	n.signal()
}

// noteAll notes that any key may have come or gone.
func (n *notes) noteAll() {
	if !n.on.Load() {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lost = true
	n.signal()
}

var _ pool.KeyJournal = (*Store)(nil)

// Watch implements pool.KeyJournal.
func (s *Store) Watch(signal func()) {
	s.notes.mu.Lock()
	defer s.notes.mu.Unlock()
	s.notes.signal = signal
	s.notes.on.Store(true)
}

// Changes implements pool.KeyJournal.
func (s *Store) Changes(empty []pool.Key) (all []pool.Key, lost bool) {
	n := &s.notes
	n.mu.Lock()
	defer n.mu.Unlock()
	all, lost = n.list, n.lost
	n.list, n.lost = empty[:0], false
	return all, lost
}
