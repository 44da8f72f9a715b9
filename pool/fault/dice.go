package fault

import (
	"context"
	"time"
)

// hits draws whether a fault happens now, and counts it.
func (s *Store) hits(k Kind) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.off[k] || s.rates[k] == 0 || s.dice[k].Float64() >= s.rates[k] {
		return false
	}
	s.count[k]++
	return true
}

// draw returns a number below n from a kind's own stream.
func (s *Store) draw(k Kind, n int64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dice[k].Int64N(n)
}

// begin injects the faults that a call meets before it reaches the store.
func (s *Store) begin(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := s.hang(ctx); err != nil {
		return err
	}
	if s.maxDelay > 0 && s.hits(Delay) {
		if err := s.sleep(ctx, time.Duration(s.draw(Delay, int64(s.maxDelay)+1))); err != nil {
			return err
		}
	}
	if s.hits(Error) {
		return ErrInjected
	}
	return nil
}

func (s *Store) hang(ctx context.Context) error {
	s.mu.Lock()
	awake := s.awake // read before the draw, so that switching Hang off after it wakes this call
	s.mu.Unlock()
	if !s.hits(Hang) {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-awake:
		return nil
	}
}

// end injects the faults that a call meets after the store.
func (s *Store) end(err error) error {
	if err == nil && s.hits(LostReply) {
		return ErrInjected
	}
	return err
}

// flip flips one random bit.
func (s *Store) flip(k Kind, p []byte) {
	if len(p) > 0 {
		bit := s.draw(k, int64(len(p))*8)
		p[bit/8] ^= 1 << (bit % 8)
	}
}
