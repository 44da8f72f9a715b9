// Package backoff is the pause between tries of something that fails: it doubles up to a limit.
package backoff

import (
	"context"
	"time"
)

// Backoff is one row of failures. It is a value, and not safe for concurrent use.
type Backoff struct {
	First, Last time.Duration // the first pause, and the longest
	pause       time.Duration
}

// Next returns the pause before the next try: First, and each time twice the one before, up to
// Last.
func (b *Backoff) Next() time.Duration {
	b.pause = min(max(2*b.pause, b.First), b.Last)
	return b.pause
}

// Pause returns what Next returned last; 0 since Reset.
func (b *Backoff) Pause() time.Duration { return b.pause }

// Reset ends the row: the next pause is First.
func (b *Backoff) Reset() { b.pause = 0 }

// Wait waits for Next, or until ctx ends, and returns ctx's error then.
func (b *Backoff) Wait(ctx context.Context) error {
	timer := time.NewTimer(b.Next())
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
