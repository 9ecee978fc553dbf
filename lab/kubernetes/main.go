// Checks manifests of Kubernetes by the types of its API: kubernetes FILE. Unknown and misspelt fields are errors, as are fields of a
// wrong type.
package main

import (
	"bytes"
	"fmt"
	"os"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// The types that manifests may have, by API version and kind.
var types = map[meta.TypeMeta]func() any{
	{APIVersion: "v1", Kind: "ConfigMap"}:                            func() any { return new(core.ConfigMap) },
	{APIVersion: "v1", Kind: "PersistentVolumeClaim"}:                func() any { return new(core.PersistentVolumeClaim) },
	{APIVersion: "v1", Kind: "Service"}:                              func() any { return new(core.Service) },
	{APIVersion: "apps/v1", Kind: "Deployment"}:                      func() any { return new(apps.Deployment) },
	{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"}:      func() any { return new(networking.NetworkPolicy) },
	{APIVersion: "monitoring.coreos.com/v1", Kind: "ServiceMonitor"}: func() any { return new(monitoring.ServiceMonitor) },
}

func check(document []byte) (meta.TypeMeta, error) {
	var kind meta.TypeMeta
	if err := yaml.Unmarshal(document, &kind); err != nil {
		return kind, err
	}
	object, known := types[kind]
	if !known {
		return kind, fmt.Errorf("unknown API version or kind")
	}
	return kind, yaml.UnmarshalStrict(document, object())
}

func main() {
	text, err := os.ReadFile(os.Args[1])
	failed := err != nil
	if failed {
		fmt.Fprintln(os.Stderr, err)
	}
	for _, document := range bytes.Split(text, []byte("\n---\n")) {
		kind, err := check(document)
		fmt.Printf("%s %s: %v\n", kind.APIVersion, kind.Kind, err)
		failed = failed || err != nil
	}
	if failed {
		os.Exit(1)
	}
}
