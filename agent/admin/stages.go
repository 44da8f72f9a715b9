package admin

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/kvagent/kvagent/transfer"
)

// DirectionNames are the labels of the kinds of jobs.
var DirectionNames = [...]string{transfer.Save: "save", transfer.Load: "load"}

// stageNames are the labels of the stages of a job, in their order.
var stageNames = [...]string{"step", "queue", "copy", "sums", "report"}

// stageBuckets are 10 us to 20 s, three for each power of ten, in seconds.
var stageBuckets = func() (bounds []float64) {
	for power := -5; power <= 1; power++ {
		for _, digit := range []float64{1, 2, 5} {
			bounds = append(bounds, digit*math.Pow10(power))
		}
	}
	return bounds[:len(bounds)-1]
}()

// JobStages are histograms of the time of jobs that copied something, by direction and stage.
type JobStages struct {
	seconds [len(DirectionNames)][len(stageNames)]prometheus.Histogram
}

func (j *JobStages) register(r prometheus.Registerer) {
	for kind, direction := range DirectionNames {
		for i, stage := range stageNames {
			j.seconds[kind][i] = prometheus.NewHistogram(prometheus.HistogramOpts{
				Name: "kvagent_transfer_stage_seconds",
				Help: "Time of jobs that copied something: waiting for the engine's step, queued until the first " +
					"copy, first to last byte, until the sums were made, until reported.",
				ConstLabels: prometheus.Labels{"direction": direction, "stage": stage}, Buckets: stageBuckets,
			})
			r.MustRegister(j.seconds[kind][i])
		}
	}
}

// Observe records the times of one job. It allocates nothing.
func (j *JobStages) Observe(kind transfer.Kind, t *transfer.Times) {
	if !t.Copied {
		return
	}
	for i, d := range [len(stageNames)]time.Duration{t.Step, t.Queue, t.Copy, t.Sums, t.Report} {
		j.seconds[kind][i].Observe(d.Seconds())
	}
}

// StageStatus is one stage of the jobs of one direction that copied something, since the start.
type StageStatus struct {
	Direction string  `json:"direction"` // load or save
	Stage     string  `json:"stage"`     // step, queue, copy, sums or report
	Jobs      uint64  `json:"jobs"`
	P50MS     float64 `json:"p50_ms"` // as precise as the histogram's buckets
	P99MS     float64 `json:"p99_ms"`
}

func (j *JobStages) status() []StageStatus {
	out := []StageStatus{}
	for kind := range j.seconds {
		for i, h := range j.seconds[kind] {
			var m dto.Metric
			_ = h.Write(&m) // of a histogram of this process: it cannot fail
			out = append(out, StageStatus{
				Direction: DirectionNames[kind], Stage: stageNames[i], Jobs: m.Histogram.GetSampleCount(),
				P50MS: 1e3 * quantile(m.Histogram, 0.5), P99MS: 1e3 * quantile(m.Histogram, 0.99),
			})
		}
	}
	return out
}

// quantile returns the q-th quantile as Prometheus' histogram_quantile does: linear in the bucket,
// at most the last bound, 0 without observations.
func quantile(h *dto.Histogram, q float64) float64 {
	if h.GetSampleCount() == 0 {
		return 0
	}
	rank := q * float64(h.GetSampleCount())
	low, below := 0.0, 0.0
	for _, b := range h.GetBucket() {
		n := float64(b.GetCumulativeCount())
		if n >= rank && n > below {
			return low + (b.GetUpperBound()-low)*(rank-below)/(n-below)
		}
		low, below = b.GetUpperBound(), n
	}
	return low
}
