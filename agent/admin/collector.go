package admin

import (
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// collector reads all metrics from the status and the counters, whose fields say by tags what they
// are:
//
//	Used   int64             `metric:"pool_used_bytes"`                   kvagent_pool_used_bytes
//	Hits   uint64            `metric:"tier_fetched_total{result=hit}"`    a series of a family
//	Tiers  []struct{ Name string `label:"tier"`; ... }                    a label of its series
//	Lost   map[string]uint64 `metric:"mover_lost_total" label:"reason"`   a series for each key
//	State  string            `metric:"tier_store_state" label:"state"`    1 for the value
//	Cold   string            `metric:"pool_file_abandoned"`               1 if there is a text
//	PIDs   []int             `metric:"orphan_movers"`                     how many
//
// A family whose name ends in _total is a counter, another one a gauge. families has their help.
type collector struct{ view *View }

// Describe implements prometheus.Collector. Which series there are depends on what is switched on.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	status := c.view.Status()
	for _, from := range []any{&status, c.view.metrics} {
		walk(reflect.ValueOf(from).Elem(), nil, func(family string, labels []label, value float64) {
			ch <- metric(family, labels, value)
		})
	}
}

type label struct{ name, value string }

type emit func(family string, labels []label, value float64)

func metric(family string, labels []label, value float64) prometheus.Metric {
	names, values := make([]string, len(labels)), make([]string, len(labels))
	for i, l := range labels {
		names[i], values[i] = l.name, l.value
	}
	kind := prometheus.GaugeValue
	if strings.HasSuffix(family, "_total") {
		kind = prometheus.CounterValue
	}
	desc := prometheus.NewDesc("kvagent_"+family, families[family], names, nil)
	return prometheus.MustNewConstMetric(desc, kind, value, values...)
}

// walk emits the series of a value and of all that is in it. labels are those of what it is in.
func walk(v reflect.Value, labels []label, out emit) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			walk(v.Elem(), labels, out)
		}
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			walk(v.Index(i), labels, out)
		}
	case reflect.Struct:
		walkStruct(v, labels, out)
	}
}

func walkStruct(v reflect.Value, labels []label, out emit) {
	t := v.Type()
	for i := range t.NumField() {
		tag := t.Field(i).Tag
		if name := tag.Get("label"); name != "" && tag.Get("metric") == "" {
			labels = append(slices.Clip(labels), label{name, v.Field(i).String()})
		}
	}
	for i := range t.NumField() {
		field := t.Field(i)
		if !field.IsExported() {
			continue
		}
		family, fixed := parseTag(field.Tag.Get("metric"))
		if family == "" {
			walk(v.Field(i), labels, out)
			continue
		}
		emitField(v.Field(i), family, field.Tag.Get("label"), append(slices.Clip(labels), fixed...), out)
	}
}

func emitField(v reflect.Value, family, name string, labels []label, out emit) {
	switch v.Kind() {
	case reflect.String:
		if name != "" && v.Len() > 0 {
			out(family, append(labels, label{name, v.String()}), 1)
		} else if name == "" {
			out(family, labels, float64(min(v.Len(), 1)))
		}
	case reflect.Slice:
		out(family, labels, float64(v.Len()))
	case reflect.Map:
		for _, key := range v.MapKeys() {
			out(family, append(slices.Clip(labels), label{name, key.String()}), number(v.MapIndex(key)))
		}
	default:
		out(family, labels, number(v))
	}
}

// parseTag splits NAME{LABEL=VALUE,...}.
func parseTag(tag string) (family string, labels []label) {
	family, rest, _ := strings.Cut(strings.TrimSuffix(tag, "}"), "{")
	for pair := range strings.SplitSeq(rest, ",") {
		if name, value, ok := strings.Cut(pair, "="); ok {
			labels = append(labels, label{name, value})
		}
	}
	return family, labels
}

// number returns a field's value in the metric's unit: seconds, or 1 for true.
func number(v reflect.Value) float64 {
	if v.Kind() != reflect.Pointer && v.CanAddr() {
		v = v.Addr()
	}
	switch n := v.Interface().(type) {
	case interface{ Load() uint64 }:
		return float64(n.Load())
	case *time.Time:
		return float64(n.UnixNano()) / 1e9
	}
	switch v = reflect.Indirect(v); {
	case v.CanInt():
		return float64(v.Int())
	case v.CanUint():
		return float64(v.Uint())
	case v.CanFloat():
		return v.Float()
	case v.Kind() == reflect.Bool && v.Bool():
		return 1
	}
	return 0
}
