package backoff

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestPausesDouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := Backoff{First: 2 * time.Second, Last: 7 * time.Second}
		for _, want := range []time.Duration{2 * time.Second, 4 * time.Second, 7 * time.Second, 7 * time.Second} {
			began := time.Now()
			err := b.Wait(t.Context())
			if err != nil || time.Since(began) != want || b.Pause() != want {
				t.Errorf("waited %v, %v, want %v", time.Since(began), err, want)
			}
		}
		if b.Reset(); b.Pause() != 0 || b.Next() != 2*time.Second {
			t.Errorf("%v after a reset", b.Pause())
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if began := time.Now(); !errors.Is(b.Wait(ctx), context.Canceled) || time.Since(began) != 0 {
			t.Error("it waits though its context has ended")
		}
	})
}
