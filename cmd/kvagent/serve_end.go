package main

import (
	"context"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"
)

// endWithin is how long the end of an agent may take beyond --drain-timeout: for what a mover may
// take to close its regions, or to be killed and reaped, and for the kernel to take a large pool's
// mappings down. With the default of --drain-timeout it is less than the 30 s that Kubernetes
// gives.
var endWithin = 15 * time.Second

// tellWithin bounds what is said of it.
const tellWithin = time.Second

// endBound ends the process when an end that was asked for takes too long: a mover in a call of the
// driver that does not return cannot be reaped, and until it is the agent must not say that the
// engines' memory is free. It does not say so: the mover has the engines' sockets, and their end is
// the fence. What the agent keeps is as after a kill.
type endBound struct {
	over    chan struct{}
	watched sync.WaitGroup
}

func newEndBound() *endBound { return &endBound{over: make(chan struct{})} }

// watch begins when ctx is done; the end of now ends the drain. movers names those that run.
func (b *endBound) watch(ctx, now context.Context, drain time.Duration, movers func() []int, log *zap.Logger) {
	b.watched.Go(func() {
		if !outlasts(ctx, now, drain, b.over) {
			return
		}
		log.Error("the agent does not come to its end: it leaves at once, and what does not end is left behind",
			zap.Ints("movers", within(tellWithin, movers)), zap.Duration("waited", endWithin))
		_ = log.Sync() // stderr has nothing to sync
		os.Exit(exitCut)
	})
}

// within is f's answer, or nothing if that does not come in time: what does not end may have the
// locks that it needs.
func within(most time.Duration, f func() []int) []int {
	answer := make(chan []int, 1)
	go func() { answer <- f() }() // ends with the process
	select {
	case list := <-answer:
		return list
	case <-time.After(most):
		return nil
	}
}

// close says that all has ended.
func (b *endBound) close() {
	close(b.over)
	b.watched.Wait()
}

// outlasts waits until over is closed, or the end has taken too long since it was asked for.
func outlasts(ctx, now context.Context, drain time.Duration, over <-chan struct{}) bool {
	select {
	case <-ctx.Done():
	case <-over:
		return false
	}
	drained := time.NewTimer(drain)
	defer drained.Stop()
	select {
	case <-drained.C:
	case <-now.Done():
	case <-over:
		return false
	}
	bound := time.NewTimer(endWithin)
	defer bound.Stop()
	select {
	case <-bound.C:
		return true
	case <-over:
		return false
	}
}
