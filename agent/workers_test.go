package agent

import (
	"fmt"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/transfer"
	"strings"
	"testing"
)

// TestMismatchIsAnAlarm has a device that copies wrongly and does not report it. It expects the
// engine to hear that the block failed, nothing of it to be stored, and operators to see it in the
// log, once, in the metrics and in the status.
func TestMismatchIsAnAlarm(t *testing.T) {
	var wrong *devicetest.Miscopy
	r := newRig(t, withConfig(func(c *Config) { c.VerifySample = 1 }), func(c *rigConfig) {
		c.wrap = func(d cudaipc.Device, arena []byte) cudaipc.Device {
			wrong = &devicetest.Miscopy{Device: d, Arena: arena, Fault: devicetest.CopiedShort}
			return wrong
		}
	})
	for _, op := range []string{"save", "load"} {
		for _, result := range []string{"matched", "mismatched", "unverified"} {
			r.wantMetric(fmt.Sprintf(`kvagent_sampled_blocks_total{op=%q,result=%q} 0`, op, result))
		}
	}
	_, w, _ := r.joinEngine(register("a"))
	for i := range 6 {
		w[0].fill(i, byte(i+1))
	}
	for i := range 2 {
		got := w[0].save(1, chain(byte(i+1), 3), uint32(3*i))
		if got[0] != blockOK || got[1] != blockOK || got[2] != blockFailed {
			t.Errorf("save %d: %v, want the last one failed", i, got)
		}
	}
	r.wantMetric(`kvagent_sampled_blocks_total{op="save",result="mismatched"} 2`)
	r.wantMetric(`kvagent_sampled_blocks_total{op="save",result="matched"} 4`)
	st := r.guests.Status()
	if s := &st.Sample; s.Every != 1 || s.Saves != (transfer.SampleCounts{Matched: 4, Mismatched: 2}) ||
		!strings.Contains(s.LastMismatch, `save of rank 0 of instance "a": group 0, block 02020000`) {
		t.Errorf("status: %+v", s)
	}
	if !st.Ready || st.Problem != "" {
		t.Errorf("ready %v, problem %q; want an agent that serves on: what is wrong was given up", st.Ready,
			st.Problem)
	}
	alarms := r.logs.FilterMessageSnippet("other bytes in the engine than in the pool").All()
	if len(alarms) != 1 {
		t.Fatalf("%d lines in the log, want one for two mismatches at once", len(alarms))
	}
	said, _ := alarms[0].ContextMap()["block"].(string)
	if !strings.HasPrefix(said, `save of rank 0 of instance "a": group 0`) ||
		!strings.Contains(said, "(the engine's 2)") {
		t.Errorf("the alarm says %q", said)
	}
}

func (r *rig) wantMetric(line string) {
	r.t.Helper()
	if text := r.metricsText(); !strings.Contains(text, line+"\n") {
		r.t.Errorf("metrics have no line %q", line)
	}
}

// TestLanesOfEachGPU expects workers of one GPU to share lanes, and those of another GPU and of
// CPUs to have their own.
func TestLanesOfEachGPU(t *testing.T) {
	a := &workers{Agent: &Agent{}, lanes: map[cudaipc.UUID]*transfer.Lanes{}}
	cpu, first, second := a.lanesLocked(cudaipc.UUID{}), a.lanesLocked(cudaipc.UUID{1}), a.lanesLocked(cudaipc.UUID{2})
	if cpu == first || cpu == second || first == second {
		t.Error("workers of two devices wait for each other's lanes")
	}
	if a.lanesLocked(cudaipc.UUID{1}) != first || a.lanesLocked(cudaipc.UUID{}) != cpu {
		t.Error("workers of one device have lanes of their own")
	}
}
