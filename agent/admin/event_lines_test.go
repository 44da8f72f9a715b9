package admin

import (
	"net/http/httptest"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/events"
	"github.com/kvagent/kvagent/pool/dram"
)

// limited is an answer that notes the limits of its writes.
type limited struct {
	*httptest.ResponseRecorder
	limits []time.Time
}

func (l *limited) SetReadDeadline(time.Time) error { return nil }

func (l *limited) SetWriteDeadline(at time.Time) error {
	l.limits = append(l.limits, at)
	return nil
}

// TestEndOfLinesHasALimitOfItsOwn, since that of the last line may be over when the agent ends.
func TestEndOfLinesHasALimitOfItsOwn(t *testing.T) {
	p, err := dram.Open(dram.Options{Bytes: 1 << 20, SlabBytes: 4 << 10, Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	desk := events.New(p, nil, "", zap.NewNop())
	desk.Close()
	s := &Server{view: &View{source: Source{Tail: desk.Tail}}}
	rw := &limited{ResponseRecorder: httptest.NewRecorder()}
	s.events(rw, httptest.NewRequestWithContext(t.Context(), "GET", "/events?follow=on", nil))
	if len(rw.limits) != 2 || rw.limits[1].Before(rw.limits[0]) {
		t.Errorf("limits of writes: %v, want one for the first line and one for the end", rw.limits)
	}
}
