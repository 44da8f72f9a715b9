package main

import (
	"bytes"
	"sync"
)

// keepLog is how much of a process's output is kept for an error, bytes.
const keepLog = 64 << 10

// tailBuffer keeps the end of what is written.
type tailBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.b.Len() > keepLog {
		t.b.Next(t.b.Len() / 2)
	}
	return t.b.Write(p)
}

func (t *tailBuffer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.String()
}
