package peer

import "sync"

// budget bounds the memory that subscriptions hold: those of one host, and all.
type budget struct {
	each, all int64 // bytes

	mu   sync.Mutex
	used int64
	of   map[string]int64 // by host, of those that hold some
}

func newBudget(l *Limits) *budget {
	return &budget{each: l.PeerBytes, all: l.Bytes, of: map[string]int64{}}
}

// take takes n bytes for a host, or returns false if they are not there.
func (b *budget) take(host string, n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n > b.each-b.of[host] || n > b.all-b.used {
		return false
	}
	b.used += n
	b.of[host] += n
	return true
}

// give gives back n bytes that were taken for a host.
func (b *budget) give(host string, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	if b.of[host] -= n; b.of[host] == 0 {
		delete(b.of, host)
	}
}

func (b *budget) taken() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// subscriptionBytes is what a subscription holds besides its message and a byte for each of its
// blocks: a goroutine and a timer, about.
const subscriptionBytes = 8 << 10
