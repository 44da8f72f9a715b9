package admin

import (
	"maps"
	"reflect"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/report"
)

// TestFamiliesAreThoseOfTheTags holds the table of help against the tags that make series.
func TestFamiliesAreThoseOfTheTags(t *testing.T) {
	found := map[string]bool{}
	tags(reflect.TypeFor[Status](), found)
	tags(reflect.TypeFor[report.Metrics](), found)
	for family := range found {
		if families[family] == "" {
			t.Errorf("%s has no help", family)
		}
	}
	for family := range families {
		if !found[family] {
			t.Errorf("%s has help, and no field has its tag", family)
		}
	}
}

func tags(t reflect.Type, found map[string]bool) {
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array:
		tags(t.Elem(), found)
	case reflect.Struct:
		for i := range t.NumField() {
			if family, _ := parseTag(t.Field(i).Tag.Get("metric")); family != "" {
				found[family] = true
			} else if t.Field(i).IsExported() {
				tags(t.Field(i).Type, found)
			}
		}
	}
}

// TestWalk makes series of every kind of field.
func TestWalk(t *testing.T) {
	type store struct {
		Name string `label:"event"`
		N    int    `metric:"events_total"`
	}
	type tier struct {
		Name  string `label:"tier"`
		State string `metric:"state" label:"state"`
		Up    bool   `metric:"up{of=it}"`
		Store []store
	}
	value := struct {
		Tiers  []tier
		Absent *tier
		Lost   map[string]uint64 `metric:"lost_total" label:"reason"`
		Calls  report.Counter    `metric:"calls_total"`
		Since  time.Time         `metric:"since_seconds"`
		Cold   string            `metric:"cold"`
		Rate   float64           `metric:"rate"`
		Quiet  int
	}{
		Tiers: []tier{{"a", "ok", true, []store{{"x", 3}}}, {Name: "b"}}, Lost: map[string]uint64{"crash": 4},
		Since: time.Unix(7, 5e8), Cold: "why", Rate: 1.5, Quiet: 1,
	}
	value.Calls.Add(2)
	got := map[string]float64{}
	walk(reflect.ValueOf(&value).Elem(), nil, func(family string, labels []label, v float64) {
		for _, l := range labels {
			family += " " + l.name + "=" + l.value
		}
		got[family] = v
	})
	want := map[string]float64{
		"state tier=a state=ok": 1, "up tier=a of=it": 1, "events_total tier=a event=x": 3, "up tier=b of=it": 0,
		"lost_total reason=crash": 4, "calls_total": 2, "since_seconds": 7.5, "cold": 1, "rate": 1.5,
	}
	if !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
