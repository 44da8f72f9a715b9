package agent

import (
	"context"
	"encoding/binary"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/transfer"
	"github.com/kvagent/kvagent/transfer/pace"
)

// owing makes the agent's saves owe their pacer more than a test lasts, on a clock that stands
// still.
func owing(c *Config) {
	now := time.Now()
	c.Pace = pace.MinRate
	c.CPUPacer = pace.New(c.Pace, func() time.Time { return now })
	c.CPUPacer.Begin(pace.Save, 100*pace.MinRate)
	c.CPUPacer.Ended(pace.Save)
}

// savePaced sends a save that can be revoked, and waits until it waits for the budget.
func (c *client) savePaced(r *rig, job uint64) {
	c.t.Helper()
	c.send(&ipc.Save{Job: job, Epoch: 1, Event: ipc.None, Revoke: 0, Sections: []ipc.Section{section(chain(1, 2), 0)}})
	r.waitFor("a save that waits for its pace", func(s admin.Status) bool {
		for _, e := range s.EngineList {
			for _, one := range e.Sessions {
				if strings.Contains(one.Step, string(transfer.WaitingPace)) {
					return true
				}
			}
		}
		return false
	})
}

// step is a decode step as STEPS has it.
func step(age, took time.Duration, requests uint32) (b []byte) {
	b = binary.LittleEndian.AppendUint32(b, uint32(age.Microseconds()))
	b = binary.LittleEndian.AppendUint32(b, uint32(took.Microseconds()))
	return binary.LittleEndian.AppendUint32(b, requests)
}

// TestStepsReachThePacer expects steps of a registered worker to be compared, and those of other
// sessions to be ignored.
func TestStepsReachThePacer(t *testing.T) {
	r := newRig(t, withConfig(func(c *Config) { c.Pace = pace.Auto }))
	_, body := r.admin("GET", "/metrics")
	for _, want := range []string{
		`kvagent_pace_rate_bytes_per_second{device="cpu"} 0`, `kvagent_pace_steps_total{beside="none",device="cpu"} 0`,
		`kvagent_pace_wait_seconds_total{device="cpu",op="write"} 0`,
		`kvagent_pace_changes_total{change="cut",device="cpu"} 0`,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("metrics at the start have no %s", want)
		}
	}
	scheduler, w, _ := r.joinEngine(register("a"))
	steps := append(step(9*time.Millisecond, 5*time.Millisecond, 3), step(4*time.Millisecond, 5*time.Millisecond, 3)...)
	for _, c := range []*client{r.dial(), scheduler, w[0]} {
		c.send(&ipc.Steps{List: steps})
		c.sync()
	}
	if p := r.guests.Status().Paces; len(p) != 1 || p[0].Alone != 2 || p[0].Device != "cpu" || p[0].Setting != "auto" {
		t.Errorf("paces: %+v", p)
	}
}

// TestStepsAreOfTheirTime expects a step to be placed by its age.
func TestStepsAreOfTheirTime(t *testing.T) {
	now := time.Unix(1000, 0)
	got := pace.ParseSteps(append(step(time.Second, 10*time.Millisecond, 7), step(0, time.Millisecond, 8)...), now)
	want := []pace.Step{
		{Begin: now.Add(-1010 * time.Millisecond), End: now.Add(-time.Second), Requests: 7},
		{Begin: now.Add(-time.Millisecond), End: now, Requests: 8},
	}
	if !slices.Equal(got, want) {
		t.Errorf("%+v", got)
	}
}

// TestSavesOfATransferAreNotPaced expects a save that waits for its pace to go on when a decode
// engine waits for its space, and loads never to wait.
func TestSavesOfATransferAreNotPaced(t *testing.T) {
	r := newRig(t, withConfig(owing))
	scheduler, w, _ := r.joinEngine(register("a"))
	c := w[0]
	c.savePaced(r, 1)
	c.send(&ipc.Load{Job: 2, Epoch: 1, Event: ipc.None, Sections: []ipc.Section{section(chain(9, 1), 5)}})
	if got := c.done(2); !all(got, blockMissing) {
		t.Errorf("a load beside a save that waits: %v", got)
	}
	scheduler.send(&ipc.Offer{Name: []byte("t"), TTLMS: testTTL})
	if got := c.done(1); !all(got, blockOK) {
		t.Errorf("the save: %v", got)
	}
	id, _, _ := r.agent.OpenSpace(register("").Space())
	if d := r.guests.Transfers(); !d.Awaited(id) || d.Awaited(id+1) {
		t.Errorf("an open transfer: its space is awaited %v, another one %v", d.Awaited(id), d.Awaited(id+1))
	}
	scheduler.send(&ipc.Offered{Name: []byte("t"), Tokens: 1})
	scheduler.sync()
	if r.guests.Transfers().Awaited(id) {
		t.Error("a transfer that is complete is waited for")
	}
}

// TestDrainWithoutPace expects a draining agent to let saves end that wait for their pace, and GPUs
// that come later to have none.
func TestDrainWithoutPace(t *testing.T) {
	r := newRig(t, withConfig(owing))
	_, w, _ := r.joinEngine(register("a"))
	w[0].savePaced(r, 1)
	soon, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	check(t, r.agent.Drain(soon))
	if got := w[0].done(1); !all(got, blockOK) {
		t.Errorf("the save: %v", got)
	}
	late := r.agent.workers.pacers.Of(deviceName(cudaipc.UUID{1}))
	late.Begin(pace.Save, 100*pace.MinRate)
	late.Ended(pace.Save)
	if !late.May() {
		t.Error("a pacer that was made after the drain has a limit")
	}
	if p := r.guests.Status().Paces; len(p) != 2 || p[0].Device != (cudaipc.UUID{1}).String() {
		t.Errorf("paces: %+v", p)
	}
}
