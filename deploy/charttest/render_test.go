// Package charttest tests deploy/chart with Helm's library: what it renders, what it refuses, and
// that the real agent starts with it.
package charttest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"sigs.k8s.io/yaml"
)

const (
	chartDir    = "../chart"
	examplesDir = "../examples"

	// image is in every set of values: without it the chart refuses.
	image = "{image: {repository: registry.invalid/kvagent, tag: v0}}"
)

// objects are the decoded manifests of a rendering or a file.
type objects struct {
	agent          *appsv1.DaemonSet
	settings       *corev1.ConfigMap
	service        *corev1.Service
	serviceMonitor *monitoringv1.ServiceMonitor
	podMonitor     *monitoringv1.PodMonitor
	deployment     *appsv1.Deployment
	disruptions    *policyv1.PodDisruptionBudget
	notes          string
}

// values parses YAML on top of an image's name.
func values(t *testing.T, text string) map[string]any {
	t.Helper()
	all := map[string]any{}
	for _, one := range []string{image, text} {
		if err := yaml.Unmarshal([]byte(one), &all); err != nil {
			t.Fatalf("%s: %v", one, err)
		}
	}
	return all
}

// render renders the chart for a cluster that has these APIs besides Kubernetes' own.
func render(t *testing.T, vals map[string]any, apis ...string) (*objects, error) {
	t.Helper()
	chart, err := loader.Load(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	caps := common.DefaultCapabilities.Copy()
	caps.APIVersions = append(caps.APIVersions, apis...)
	release := common.ReleaseOptions{Name: "kv", Namespace: "inference", Revision: 1, IsInstall: true}
	all, err := util.ToRenderValues(chart, vals, release, caps)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return nil, err
	}
	out := &objects{}
	for name, text := range files {
		switch filepath.Base(name) {
		case "NOTES.txt":
			out.notes = text
		case "_helpers.tpl":
		default:
			out.add(t, name, text)
		}
	}
	return out, nil
}

// mustRender renders values that are allowed.
func mustRender(t *testing.T, text string, apis ...string) *objects {
	t.Helper()
	out, err := render(t, values(t, text), apis...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// add decodes the documents of a file: a field that its type does not have, or has twice, is an
// error.
func (o *objects) add(t *testing.T, name, text string) {
	t.Helper()
	for _, doc := range strings.Split("\n"+text, "\n---") {
		var head struct{ Kind string }
		if err := yaml.Unmarshal([]byte(doc), &head); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, doc)
		}
		if head.Kind == "" {
			continue
		}
		if err := yaml.UnmarshalStrict([]byte(doc), o.place(t, name, head.Kind)); err != nil {
			t.Errorf("%s: %s: %v\n%s", name, head.Kind, err, doc)
		}
	}
}

// place returns where an object of a kind is decoded to.
func (o *objects) place(t *testing.T, name, kind string) any {
	t.Helper()
	switch kind {
	case "DaemonSet":
		o.agent = &appsv1.DaemonSet{}
		return o.agent
	case "ConfigMap":
		o.settings = &corev1.ConfigMap{}
		return o.settings
	case "Service":
		o.service = &corev1.Service{}
		return o.service
	case "ServiceMonitor":
		o.serviceMonitor = &monitoringv1.ServiceMonitor{}
		return o.serviceMonitor
	case "PodMonitor":
		o.podMonitor = &monitoringv1.PodMonitor{}
		return o.podMonitor
	case "Deployment":
		o.deployment = &appsv1.Deployment{}
		return o.deployment
	case "PodDisruptionBudget":
		o.disruptions = &policyv1.PodDisruptionBudget{}
		return o.disruptions
	}
	t.Fatalf("%s: an object of kind %q", name, kind)
	return nil
}

// example decodes a file of deploy/examples.
func example(t *testing.T, name string) *objects {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(examplesDir, name))
	if err != nil {
		t.Fatal(err)
	}
	out := &objects{}
	out.add(t, name, string(text))
	return out
}
