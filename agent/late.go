package agent

import (
	"sync"
	"time"
)

// lateLookup is a look-up that was answered beyond its deadline.
type lateLookup struct {
	read       time.Time
	took, over time.Duration
}

// latest keeps the look-up that was farthest beyond its deadline, and when that was: only so can it be held against what the machine did meanwhile.
type latest struct {
	mu  sync.Mutex
	one lateLookup
}

func (l *latest) show(one lateLookup) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one.over > l.one.over {
		l.one = one
	}
}

func (l *latest) get() lateLookup {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.one
}
